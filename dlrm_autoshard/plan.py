"""Which rank owns which shard, and what it takes for that to be legal. A shard is a table, or some of its columns.

plan = ShardingPlan({"user": 0, "item[0:64]": 0, "item[64:128]": 1}, world_size=2)
plan.tables_on(1)                        # ("item[64:128]",)
plan.moves_to(other)                     # (Move("user", source=0, destination=1),)
check_plan(plan, memory, topology)       # PlanError where a rank overflows
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.json_file import FormatError, checked, read_json
from dlrm_autoshard.formats.numbers import Count, Name, Ranks
from dlrm_autoshard.tables import Shard, TableConfig, TableOptimizer


class PlanRecord(TypedDict):
    """A plan as JSON. rank_of: each shard's owner, tables in canonical order. schema: 2 where a table is split."""

    schema: Literal[1, 2]
    world_size: Ranks
    rank_of: dict[Name, Count]


class PlanError(UserError):
    """A plan that cannot be: its message says what, how much, and what to try."""


@dataclass(frozen=True)
class Move:
    """A shard on the way from one rank to another; where a table is split anew, columns that one shard gives another.

    table: name of what travels. leaves, arrives: the shards that it is of, before and after, if not one of its own.
    """

    table: str
    source: int
    destination: int
    leaves: str | None = None
    arrives: str | None = None


@dataclass(frozen=True)
class ShardingPlan:
    """Owner rank of every shard. Immutable; the order of `rank_of` is the tables' canonical order, parts by columns.

    rank_of: by the shards' names; a table that is not split goes by its own.
    """

    rank_of: Mapping[str, int]
    world_size: int

    def __post_init__(self) -> None:
        for name, rank in self.rank_of.items():
            if not 0 <= rank < self.world_size:
                raise PlanError(
                    f"table '{name}' is placed on rank {rank}, but there are {self.world_size} ranks "
                    f"(0 to {self.world_size - 1}). Make the plan for this number of ranks."
                )
        for table in self.split_tables:
            _check_parts(table, self.parts_of(table))

    @cached_property
    def _parts(self) -> Mapping[str, tuple[Shard, ...]]:
        """Of each table, by columns; tables in canonical order."""
        parts: dict[str, list[Shard]] = {}
        for name in self.rank_of:
            shard = Shard.parse(name)
            parts.setdefault(shard.table, []).append(shard)
        return {table: tuple(sorted(of, key=lambda shard: shard.columns or (0, 0))) for table, of in parts.items()}

    def parts_of(self, table: str) -> tuple[Shard, ...]:
        """The table's shards by columns: one where it is whole, none where the plan doesn't place it."""
        return self._parts.get(table, ())

    @cached_property
    def split_tables(self) -> tuple[str, ...]:
        if not any(name.endswith("]") for name in self.rank_of):
            return ()
        return tuple(table for table, parts in self._parts.items() if parts != (Shard(table),))

    @property
    def most_parts(self) -> int:
        """Of any table; 1: none is split."""
        return max(map(len, self._parts.values()), default=1)

    def shards_on(self, rank: int) -> tuple[Shard, ...]:
        return tuple(Shard.parse(name) for name in self.tables_on(rank))

    def tables_on(self, rank: int) -> tuple[str, ...]:
        """Names of the shards that `rank` owns, in canonical order."""
        return tuple(name for name, owner in self.rank_of.items() if owner == rank)

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Ranks that own something of this table, or of this part of one."""
        wanted = Shard.parse(name)
        return tuple(sorted({self.rank_of[str(s)] for s in self.parts_of(wanted.table) if s & wanted is not None}))

    def moves_to(self, new_plan: ShardingPlan) -> tuple[Move, ...]:
        """Moves that turn this plan into `new_plan`, in canonical table order: the same on every rank."""
        return tuple(move for move in self.changes_to(new_plan) if move.source != move.destination)

    def changes_to(self, new_plan: ShardingPlan) -> tuple[Move, ...]:
        """`moves_to`, and what stays on its rank as another shard."""
        new_plan.check_tables(self._parts)
        changes = []
        for table, parts in self._parts.items():
            for old, new in itertools.product(parts, new_plan.parts_of(table)):
                source, destination, common = self.rank_of[str(old)], new_plan.rank_of[str(new)], old & new
                if common is not None and (old != new or source != destination):
                    leaves, arrives = (None if shard == common else str(shard) for shard in (old, new))
                    changes.append(Move(str(common), source, destination, leaves, arrives))
        return tuple(changes)

    def check_tables(self, names: Iterable[str]) -> None:
        """PlanError unless this plan places exactly the tables (or shards) `names`, whole or in parts."""
        wanted = set(names)
        placed = {name if name in wanted else Shard.parse(name).table for name in self.rank_of}
        if wanted != placed:
            parts = []
            if wanted - placed:
                parts.append(f"it does not place {_some(wanted - placed)}")
            if placed - wanted:
                parts.append(f"it places {_some(placed - wanted)}, which the model does not have")
            raise PlanError(f"the plan is for other tables: {'; '.join(parts)}. Make a new plan for this model.")

    def ordered(self, names: Sequence[str]) -> ShardingPlan:
        """The same placement with tables in the order of `names`."""
        self.check_tables(names)
        shards = [str(shard) for name in names for shard in (self.parts_of(name) or (Shard.parse(name),))]
        return ShardingPlan({shard: self.rank_of[shard] for shard in shards}, self.world_size)

    @property
    def fingerprint(self) -> str:
        """Short stable name of this placement."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        return {"schema": 2 if self.split_tables else 1, "world_size": self.world_size, "rank_of": dict(self.rank_of)}

    @staticmethod
    def from_json(record: Any) -> ShardingPlan:
        try:
            plan = checked(PlanRecord, record)
        except FormatError as error:
            raise PlanError(f"this is no sharding plan: {error}") from error
        return ShardingPlan(plan["rank_of"], plan["world_size"])

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.as_text())

    def as_text(self) -> str:
        """A plan file's."""
        return json.dumps(self.to_json(), indent=1) + "\n"

    @staticmethod
    def load(path: Path) -> ShardingPlan:
        try:
            plan = read_json(path, PlanRecord, "plan file")
            return ShardingPlan(plan["rank_of"], plan["world_size"])
        except FormatError as error:
            raise PlanError(str(error)) from error
        except PlanError as error:
            raise PlanError(f"plan file '{path}': {error}") from error


def _check_parts(table: str, parts: Sequence[Shard]) -> None:
    """PlanError unless they are columns from 0 on, each exactly once, as fbgemm can hold them. Where they end, the
    plan doesn't know: see `shard_tables`."""
    if len(parts) == 1:
        raise PlanError(f"'{parts[0]}' is the only part of its table: one that is whole goes by its name, '{table}'.")
    end = 0
    for shard in parts:
        start, stop = shard.columns or (-1, -1)
        if shard.columns is None or start != end:
            raise PlanError(
                f"the parts of table '{table}' must hold its columns once each, from 0 on; "
                f"they are {', '.join(str(part) for part in parts)}."
            )
        if start % 4 or stop % 4 or start >= stop:
            raise PlanError(f"'{shard}' is no part that can be held: parts start and stop at multiples of 4.")
        end = stop


def shard_tables(tables: Sequence[TableConfig], plan: ShardingPlan) -> tuple[TableConfig, ...]:
    """All shards of the plan, in canonical order, each as a table of its own. PlanError where the plan's parts are
    not of these tables."""
    return tuple(itertools.chain(*shards_by_table(tables, plan)))


def shards_by_table(tables: Sequence[TableConfig], plan: ShardingPlan) -> list[tuple[TableConfig, ...]]:
    """`shard_tables`, of each table by columns."""
    plan.check_tables(table.name for table in tables)
    shards: list[tuple[TableConfig, ...]] = []
    for table in tables:
        if table.name in plan.rank_of:
            shards.append((table,))
            continue
        parts = [shard.columns for shard in plan.parts_of(table.name) if shard.columns is not None]
        if parts[-1][1] != table.embedding_dim:
            raise PlanError(
                f"the plan is for other tables: table '{table.name}' has {table.embedding_dim} columns, and its parts "
                f"hold {parts[-1][1]}. Make a new plan for this model."
            )
        shards.append(tuple(table.part(*columns) for columns in parts))
    return shards


@dataclass(frozen=True)
class Topology:
    """The ranks a plan is for.

    memory_bytes: bytes free for tables on each rank; None where it is not limited.
    speed: relative speed of each rank at computation (1.0 is usual; 0.5 takes twice as long); None: all 1.0.
    excluded: ranks that must stay empty.
    hosts: number of each rank's host, from 0; None: all ranks are on one.
    """

    world_size: int
    memory_bytes: tuple[int, ...] | None = None
    speed: tuple[float, ...] | None = None
    excluded: frozenset[int] = frozenset()
    hosts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        entries = {"autoshard.memory_gib": self.memory_bytes, "the ranks' speed": self.speed, "hosts": self.hosts}
        for name, values in entries.items():
            if values is not None and len(values) != self.world_size:
                raise PlanError(
                    f"{name} has {len(values)} entries, and there are {self.world_size} ranks. "
                    "Give one number for all ranks, or one for each."
                )
        if len(self.excluded) >= self.world_size:
            raise PlanError("every rank is excluded; at least one must be able to own tables")

    @property
    def usable_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank not in self.excluded)

    @property
    def ranks_by_host(self) -> tuple[frozenset[int], ...]:
        hosts = self.hosts or (0,) * self.world_size
        return tuple(frozenset(r for r, h in enumerate(hosts) if h == host) for host in sorted(set(hosts)))


@dataclass(frozen=True)
class Constraints:
    """What the user asks of a plan beside memory, by names of tables (all of their parts) or of parts.

    pinned: table -> the rank that must own it. together: groups that share a rank. apart: groups in which no
    two tables share one. Tables are cut where the parts that are named begin and end.
    """

    pinned: Mapping[str, int] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    apart: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def named(self) -> Mapping[str, Shard]:
        """All that any of them names, by name."""
        names = itertools.chain(self.pinned, *self.together, *self.apart)
        return {name: Shard.parse(name) for name in names}

    def holders(self, shards: Sequence[Shard]) -> dict[str, list[int]]:
        """Of all that is named, the numbers of the shards that hold some of it: a constraint on a table is one on its
        parts, and the other way round. PlanError where there are none."""
        numbers = {name: [i for i, s in enumerate(shards) if s & part] for name, part in self.named.items()}
        for name, own in numbers.items():
            if not own:
                raise PlanError(f"a constraint names table '{name}', which the model does not have.")
        return numbers

    def have_cut(self, shards: Sequence[Shard]) -> bool:
        """Whether none of the shards holds more than a part that is named, beside it."""
        return all(s & part in (None, s) for part in self.named.values() if part.columns for s in shards)

    def bind(self, shard: Shard) -> bool:
        """Whether something asks that the shard, or a part of it, be on one rank."""
        return any(shard & self.named[name] for name in itertools.chain(self.pinned, *self.together))

    @cached_property
    def cuts(self) -> Mapping[str, frozenset[int]]:
        """Of each table some parts of which are named: the columns at which they begin and end."""
        cuts: dict[str, set[int]] = {}
        for shard in self.named.values():
            if shard.columns is not None:
                cuts.setdefault(shard.table, set()).update(shard.columns)
        return {table: frozenset(columns) for table, columns in cuts.items()}

    def pieces(self, table: TableConfig) -> tuple[TableConfig, ...]:
        """What the table, or part of one, is cut into; itself where no cut is within it."""
        start, stop = table.columns
        within = sorted(cut for cut in self.cuts.get(Shard.parse(table.name).table, ()) if start < cut < stop)
        return tuple(table.part(*columns) for columns in itertools.pairwise([start, *within, stop]))

    def check(self, tables: Sequence[TableConfig], max_parts: int, splits_allowed: bool) -> None:
        """PlanError where they name parts that these tables don't have or may not be cut into, or contradict
        themselves. splits_allowed: False under row-wise Adagrad with one sum a row."""
        of = {table.name: table for table in tables}
        groups = {"pinned": [tuple(self.pinned)], "together": self.together, "apart": self.apart}
        for key, names in groups.items():
            for name in itertools.chain(*names):
                try:
                    if (table := of.get(Shard.parse(name).table)) is not None:
                        table.shard(name)
                except UserError as error:
                    raise PlanError(f"{key} names '{name}', but {error}") from error
        for one, other in itertools.combinations(self.pinned, 2):
            if self.pinned[one] != self.pinned[other] and self.named[one] & self.named[other]:
                raise PlanError(
                    f"pinned puts '{one}' on rank {self.pinned[one]} and '{other}' on rank {self.pinned[other]}, which "
                    "have columns in common. Leave one of them out."
                )
        for one, other in itertools.chain(*(itertools.combinations(group, 2) for group in self.apart)):
            if self.named[one] & self.named[other]:
                raise PlanError(
                    f"apart names '{one}' and '{other}' in one group, which have columns in common: they cannot be on "
                    "different ranks. Leave one of them out."
                )
        for table in tables:
            parts = [piece.name for piece in self.pieces(table)]
            if len(parts) > 1 and not splits_allowed:
                name = next(name for name, part in self.named.items() if part.table == table.name and part.columns)
                raise PlanError(
                    f"a constraint names '{name}', a part of a table, and no table is split here: row-wise Adagrad "
                    "keeps one sum of squares a row over all columns. Set tables.optimizer.per_part: true for a sum a "
                    f"row and part, which is another optimizer; or use adagrad, or name '{table.name}', all of it."
                )
            if len(parts) > max(1, max_parts):
                raise PlanError(
                    f"constraints cut table '{table.name}' into {len(parts)} parts ({', '.join(parts)}), and "
                    f"autoshard.splits.max_parts is {max_parts}. Raise that, or name fewer of its parts."
                )


@dataclass(frozen=True)
class Splits:
    """Which tables may be split by columns. max_parts: of one table; 1: none are. min_dim: columns of a part.

    allowed: False where parts would train another model (each with its own row-wise Adagrad): results say what splits
    would bring then. optimizer: whose state parts carry.
    """

    max_parts: int = 1
    min_dim: int = 16
    allowed: bool = True
    optimizer: TableOptimizer = "rowwise_adagrad"

    def settings_for(self, shards: Iterable[TableConfig]) -> str:
        """What to set, other than it is here, for tables to be split so."""
        dims: dict[str, list[int]] = {}
        for shard in shards:
            dims.setdefault(Shard.parse(shard.name).table, []).append(shard.embedding_dim)
        split = [of_table for of_table in dims.values() if len(of_table) > 1]
        parts, narrowest = max(map(len, split)), min(map(min, split))
        other = {
            "tables.optimizer.per_part: true (or use sgd)": not self.allowed,
            f"autoshard.splits.max_parts: {parts}": parts > self.max_parts,
            f"autoshard.splits.min_dim: {narrowest}": narrowest < self.min_dim,
        }
        return " and ".join(setting for setting, differs in other.items() if differs)


def round_robin(names: Sequence[str], topology: Topology) -> ShardingPlan:
    """Table i on the i-th usable rank, round and round; knows nothing of memory or cost."""
    ranks = topology.usable_ranks
    return ShardingPlan({name: ranks[i % len(ranks)] for i, name in enumerate(names)}, topology.world_size)


def check_plan(
    plan: ShardingPlan,
    table_bytes: Mapping[str, int],
    topology: Topology,
    constraints: Constraints = Constraints(),
) -> None:
    """PlanError where `plan` breaks memory, an exclusion or a constraint; nothing otherwise. table_bytes: of each
    shard that the plan places."""
    plan.check_tables(table_bytes)
    if plan.world_size != topology.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, this job has {topology.world_size}. "
            "Make a plan for this number of ranks, or launch as many as the plan has."
        )
    for table, rank in plan.rank_of.items():
        if rank in topology.excluded:
            raise PlanError(f"table '{table}' is placed on rank {rank}, which is excluded.")
    for table, rank in constraints.pinned.items():
        for owner in plan.ranks_of(table):
            if owner != rank:
                raise PlanError(f"table '{table}' is pinned to rank {rank} but placed on rank {owner}.")
    for group in constraints.together:
        if len({rank for table in group for rank in plan.ranks_of(table)}) > 1:
            raise PlanError(f"tables {_some(group)} must stay together but are on several ranks.")
    for group in constraints.apart:
        owners = [rank for table in group for rank in plan.ranks_of(table)]
        if len(set(owners)) < len(owners):
            raise PlanError(f"tables {_some(group)} must stay apart but two of them share a rank.")
    if topology.memory_bytes is not None:
        used = bytes_per_rank(plan, table_bytes)
        for rank, (need, free) in enumerate(zip(used, topology.memory_bytes, strict=True)):
            if need > free:
                raise PlanError(
                    f"rank {rank} needs {gib(need)} for its {len(plan.tables_on(rank))} tables but has {gib(free)} "
                    f"({gib(need - free)} short). Add ranks, raise autoshard.memory_gib, or shrink its largest tables."
                )


def bytes_per_rank(plan: ShardingPlan, table_bytes: Mapping[str, int]) -> list[int]:
    used = [0] * plan.world_size
    for table, rank in plan.rank_of.items():
        used[rank] += table_bytes[table]
    return used


def gib(num_bytes: float) -> str:
    """Bytes for people: '6.2 GiB', '12 MiB', '340 KiB'."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:{'.3g' if abs(num_bytes) < 999.5 * size else ',.0f'}} {unit}"
    return f"{int(num_bytes)} bytes"


def _some(names: Iterable[str], most: int = 5) -> str:
    ordered = sorted(names)
    shown = ", ".join(f"'{name}'" for name in ordered[:most])
    return shown if len(ordered) <= most else f"{shown} and {len(ordered) - most} more"
