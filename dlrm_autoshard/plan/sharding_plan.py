"""Which rank owns which shard: a table, or some of its columns or rows.

plan = ShardingPlan({"user": 0, "item[0:64]": 0, "item[64:128]": 1}, world_size=2)
plan.shards_on(1)                        # ("item[64:128]",)
plan.moves_to(other)                     # (Move("user", source=0, destination=1),)
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.json_file import FormatError, checked, read_json
from dlrm_autoshard.formats.numbers import Count, Name, Ranks
from dlrm_autoshard.formats.words import some_of
from dlrm_autoshard.tables import Shard, TableConfig


class PlanCosts(TypedDict):
    """The costs that a plan was made by: in words, and as the directory of `fit`; null: the shipped costs."""

    costs_from: str
    fitted: str | None


class PlanRecord(TypedDict):
    """A plan as JSON. rank_of: each shard's owner, tables in canonical order. schema: 2 if a table is split by
    columns, 3 if one is split by rows. made_by: in plans by the command `plan`."""

    schema: Literal[1, 2, 3]
    world_size: Ranks
    rank_of: dict[Name, Count]
    made_by: NotRequired[PlanCosts]


class MoveRecord(TypedDict):
    """A completed `Move` as JSON. bytes: of weights and optimizer state sent."""

    shard: Name
    from_rank: Count
    to_rank: Count
    bytes: Count


class PlanError(UserError):
    """An impossible plan; the message says what is wrong, by how much, and what to try."""


@dataclass(frozen=True)
class Move:
    """A shard that moves between ranks. If a table's split changes, the overlap of an old and a new shard.

    leaves, arrives: the old and new shards that contain it, if different from it.
    """

    shard: Shard
    source: int
    destination: int
    leaves: Shard | None = None
    arrives: Shard | None = None

    def record(self, num_bytes: int) -> MoveRecord:
        return MoveRecord(shard=str(self.shard), from_rank=self.source, to_rank=self.destination, bytes=num_bytes)


@dataclass(frozen=True)
class ShardingPlan:
    """Owner rank of every shard; immutable.

    rank_of: by shard, in canonical order of tables; a whole table goes by its name.
    """

    rank_of: Mapping[str, int]
    world_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank_of", {Shard(name): rank for name, rank in self.rank_of.items()})
        for name, rank in self.rank_of.items():
            if not 0 <= rank < self.world_size:
                raise PlanError(
                    f"table '{name}' is placed on rank {rank}, but there are {self.world_size} ranks "
                    f"(0 to {self.world_size - 1}). Make the plan for this number of ranks."
                )
        for table in self.split_tables:
            _check_parts(table, self.parts_of(table))

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """All shards, in canonical order."""
        return tuple(map(Shard, self.rank_of))

    @cached_property
    def _parts(self) -> Mapping[str, tuple[Shard, ...]]:
        """Each table's shards, sorted by rows, then columns; tables in canonical order."""
        parts: dict[str, list[Shard]] = {}
        for shard in self.shards:
            parts.setdefault(shard.table, []).append(shard)
        return {
            table: tuple(sorted(of, key=lambda shard: (shard.rows or (0, 0), shard.columns or (0, 0))))
            for table, of in parts.items()
        }

    def parts_of(self, table: str) -> tuple[Shard, ...]:
        """Returns the table's shards by rows, then columns: one if it is whole, none if the plan does not place it."""
        return self._parts.get(table, ())

    @cached_property
    def split_tables(self) -> tuple[str, ...]:
        if all(shard.is_whole for shard in self.shards):
            return ()
        return tuple(table for table, parts in self._parts.items() if parts != (Shard(table),))

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """Names of the placed tables, whole or split, in canonical order."""
        return tuple(self._parts)

    @cached_property
    def column_split_tables(self) -> tuple[str, ...]:
        return tuple(t for t in self.split_tables if any(shard.columns for shard in self.parts_of(t)))

    @cached_property
    def row_split_tables(self) -> tuple[str, ...]:
        return tuple(t for t in self.split_tables if any(shard.rows for shard in self.parts_of(t)))

    @property
    def most_parts(self) -> int:
        """Largest number of parts of a table; 1: none is split."""
        return max(map(len, self._parts.values()), default=1)

    def shards_on(self, rank: int) -> tuple[Shard, ...]:
        """Returns the shards of `rank`, in canonical order."""
        return tuple(shard for shard in self.shards if self.rank_of[shard] == rank)

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Returns the ranks that own some of this table, or of this part."""
        wanted = Shard(name)
        return tuple(sorted({self.rank_of[s] for s in self.parts_of(wanted.table) if s & wanted is not None}))

    def moves_to(self, new_plan: ShardingPlan) -> tuple[Move, ...]:
        """Returns the moves that turn this plan into `new_plan`, in canonical table order: equal on every rank."""
        return tuple(move for move in self.changes_to(new_plan) if move.source != move.destination)

    def changes_to(self, new_plan: ShardingPlan) -> tuple[Move, ...]:
        """Returns `moves_to`, and the parts that stay on their rank but become part of another shard."""
        new_plan.check_tables(self._parts)
        changes = []
        for table, parts in self._parts.items():
            for old, new in itertools.product(parts, new_plan.parts_of(table)):
                source, destination, common = self.rank_of[old], new_plan.rank_of[new], old & new
                if common is not None and (old != new or source != destination):
                    leaves, arrives = (None if shard == common else shard for shard in (old, new))
                    changes.append(Move(common, source, destination, leaves, arrives))
        return tuple(changes)

    def check_tables(self, names: Iterable[str]) -> None:
        """Raises PlanError unless this plan places exactly the tables (or shards) `names`, whole or split."""
        wanted = set(names)
        placed = {shard if shard in wanted else shard.table for shard in self.shards}
        if wanted != placed:
            parts = []
            if wanted - placed:
                parts.append(f"it does not place {some_of(wanted - placed)}")
            if placed - wanted:
                parts.append(f"it places {some_of(placed - wanted)}, which the model does not have")
            raise PlanError(f"the plan is for other tables: {'; '.join(parts)}. Make a new plan for this model.")

    def ordered(self, names: Sequence[str]) -> ShardingPlan:
        """Returns the same placement with tables in the order of `names`."""
        self.check_tables(names)
        shards = [shard for name in names for shard in (self.parts_of(name) or (Shard(name),))]
        return ShardingPlan({shard: self.rank_of[shard] for shard in shards}, self.world_size)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of this placement."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        schema = 3 if self.row_split_tables else 2 if self.split_tables else 1
        rank_of = {str(shard): self.rank_of[shard] for shard in self.shards}
        return {"schema": schema, "world_size": self.world_size, "rank_of": rank_of}

    @staticmethod
    def from_json(record: Any) -> ShardingPlan:
        try:
            plan = checked(PlanRecord, record)
        except FormatError as error:
            raise PlanError(f"this is not a sharding plan: {error}") from error
        return ShardingPlan(plan["rank_of"], plan["world_size"])

    def save(self, path: Path, made_by: PlanCosts | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.as_text(made_by))

    def as_text(self, made_by: PlanCosts | None = None) -> str:
        """Returns the text of a plan file."""
        record = self.to_json() | ({} if made_by is None else {"made_by": made_by})
        return json.dumps(record, indent=1) + "\n"

    @staticmethod
    def load(path: Path) -> ShardingPlan:
        try:
            plan = read_json(path, PlanRecord, "plan file")
            return ShardingPlan(plan["rank_of"], plan["world_size"])
        except FormatError as error:
            raise PlanError(str(error)) from error
        except PlanError as error:
            raise PlanError(f"plan file '{path}': {error}") from error


def costs_of_plan(path: Path) -> PlanCosts | None:
    """Returns the costs that the plan in a file was made by, if recorded."""
    return read_json(path, PlanRecord, "plan file").get("made_by")


def _check_parts(table: str, parts: Sequence[Shard]) -> None:
    """Raises PlanError unless parts by columns cover columns from 0 on once each, in ranges that fbgemm can hold, and
    parts by rows do not overlap. A plan does not know the tables' sizes: `shard_tables` checks those."""
    if len(parts) == 1:
        raise PlanError(f"'{parts[0]}' is the only part of its table: name a whole table '{table}'.")
    if any(shard.rows is not None for shard in parts):
        for shard in parts:
            (first, last), (start, stop) = shard.rows or (0, 1), shard.columns or (0, 4)
            if first >= last or start % 4 or stop % 4 or start >= stop:
                raise PlanError(f"'{shard}' cannot be a part: columns must start and stop at multiples of 4.")
        for one, other in itertools.combinations(parts, 2):
            if one & other is not None:
                raise PlanError(f"'{one}' and '{other}' have rows and columns in common: each may be held only once.")
        return
    end = 0
    for shard in parts:
        start, stop = shard.columns or (-1, -1)
        if shard.columns is None or start != end:
            raise PlanError(
                f"the parts of table '{table}' must hold its columns once each, from 0 on, but "
                f"they are {', '.join(str(part) for part in parts)}."
            )
        if start % 4 or stop % 4 or start >= stop:
            raise PlanError(f"'{shard}' cannot be a part: columns must start and stop at multiples of 4.")
        end = stop


def shard_tables(tables: Sequence[TableConfig], plan: ShardingPlan) -> tuple[TableConfig, ...]:
    """Returns all shards of the plan as tables, in canonical order. PlanError if the plan's parts do not fit these
    tables."""
    return tuple(itertools.chain(*shards_by_table(tables, plan)))


def shards_by_table(tables: Sequence[TableConfig], plan: ShardingPlan) -> list[tuple[TableConfig, ...]]:
    """Returns `shard_tables` grouped by table, each by rows, then columns."""
    plan.check_tables(table.name for table in tables)
    shards: list[tuple[TableConfig, ...]] = []
    for table in tables:
        if table.name in plan.rank_of:
            shards.append((table,))
            continue
        parts = plan.parts_of(table.name)
        columns, rows = [part.columns for part in parts], [part.rows for part in parts]
        for what, wanted, ranges in (("columns", table.embedding_dim, columns), ("rows", table.num_embeddings, rows)):
            held = max((held[1] for held in ranges if held is not None), default=wanted)
            if held != wanted:
                raise PlanError(
                    f"the plan is for other tables: table '{table.name}' has {wanted:,} {what}, but its parts hold "
                    f"{held:,}. Make a new plan for this model."
                )
        own = tuple(table.holding(shard) for shard in parts)
        misnamed = [str(named) for named, shard in zip(parts, own, strict=True) if named != shard.shard]
        if misnamed:
            raise PlanError(
                f"'{misnamed[0]}' names all rows or all columns of table '{table.name}'. Leave them out of the name."
            )
        if sum(s.num_embeddings * s.embedding_dim for s in own) < table.num_embeddings * table.embedding_dim:
            raise PlanError(
                f"the parts of table '{table.name}' must hold its rows and columns once each, but "
                f"they are {', '.join(map(str, parts))}."
            )
        shards.append(own)
    return shards


def bytes_per_rank(plan: ShardingPlan, table_bytes: Mapping[str, int]) -> list[int]:
    """Returns bytes of tables on each rank."""
    used = [0] * plan.world_size
    for table, rank in plan.rank_of.items():
        used[rank] += table_bytes[table]
    return used
