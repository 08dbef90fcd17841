"""Cuts a table, or a part that constraints name, evenly by columns or by rows.

for piece in pieces_of(shards, tables_and_stats, constraints):
    for parts in piece.ways(splits, rows=True): ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dlrm_autoshard.plan.constraints import Constraints, Splits
from dlrm_autoshard.tables import TableConfig, TableStats


@dataclass(frozen=True)
class Piece:
    """A table, or a part that constraints cut out. parts: its current shards. stats: the table's. beside: number of the
    table's parts in other pieces."""

    whole: TableConfig
    parts: tuple[TableConfig, ...]
    stats: TableStats
    beside: int

    def ways(self, splits: Splits, *, rows: bool) -> Iterator[tuple[TableConfig, ...]]:
        """Yields the parts of each cut of the piece that `splits` allows, fewest parts first. rows: also by rows."""
        for count in range(2, splits.max_parts - self.beside + 1):
            by_columns = self.whole.even_columns(count, splits.min_dim)
            if by_columns is not None and self.whole.may_split(splits.allowed):
                yield by_columns
            by_rows = self.whole.even_rows(count, self.stats) if rows else None
            if by_rows is not None:
                yield by_rows

    def other_ways(self, splits: Splits) -> Iterator[tuple[TableConfig, ...]]:
        """Yields the piece in one part more, one fewer, or twice as many; and by rows instead of columns, or the
        reverse."""
        count, now = len(self.parts), by_rows(self.parts)
        if count == 2:
            yield (self.whole,)
        for parts in self.ways(splits, rows=splits.rows_to_balance):
            as_now = count == 1 or by_rows(parts) == now
            if len(parts) - count in ((1, -1, count) if as_now else (0,)):
                yield parts

    def replaced(self, shards: Sequence[TableConfig], parts: Sequence[TableConfig]) -> list[TableConfig]:
        """Returns the shards with `parts` in place of the piece's."""
        here = {shard.name for shard in shards if shard.shard & self.whole.shard is not None}
        first = next(number for number, shard in enumerate(shards) if shard.name in here)
        return [*shards[:first], *parts, *(shard for shard in shards[first:] if shard.name not in here)]


def pieces_of(
    shards: Sequence[TableConfig], wholes: Iterable[tuple[TableConfig, TableStats]], constraints: Constraints
) -> tuple[Piece, ...]:
    """Returns the tables, or pieces that constraints cut them into, that are neither pinned nor kept together."""
    of: dict[str, list[TableConfig]] = {}
    for shard in shards:
        of.setdefault(shard.shard.table, []).append(shard)
    found = []
    for whole, stats in ((piece, stats) for table, stats in wholes for piece in constraints.pieces(table)):
        own = of[whole.shard.table]
        parts = tuple(part for part in own if part.shard & whole.shard is not None)
        if not constraints.bind(whole.shard):
            found.append(Piece(whole, parts, stats, len(own) - len(parts)))
    return tuple(found)


def by_rows(parts: Sequence[TableConfig]) -> bool:
    """Whether any of these parts is a range of rows."""
    return any(part.shard.rows is not None for part in parts)
