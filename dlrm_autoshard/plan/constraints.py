"""The ranks of a plan and its constraints: memory, pins, tables kept together or apart, splits.

check_plan(plan, table_bytes, topology, constraints)       # PlanError, such as for too little memory on a rank
round_robin(names, topology)                               # the simplest plan
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.words import gib, some_of
from dlrm_autoshard.plan.sharding_plan import PlanError, ShardingPlan, bytes_per_rank
from dlrm_autoshard.tables import Shard, TableConfig, TableOptimizer


@dataclass(frozen=True)
class Topology:
    """The ranks of a plan.

    memory_bytes: bytes free for tables on each rank; None: unlimited.
    speed: relative speed of each rank at computation (0.5 takes twice as long as 1.0); None: all 1.0.
    excluded: ranks that must stay empty.
    hosts: index of each rank's host; None: all ranks are on one host.
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
                    f"{name} has {len(values)} entries, but there are {self.world_size} ranks. "
                    "Give one number for all ranks, or one per rank."
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
    """A user's constraints on a plan besides memory. Names are of tables, with all of their parts, or of parts.

    pinned: name -> the rank that must own it. together: groups that must share a rank. apart: groups in which no two
    may share a rank. Tables are cut at the borders of named parts.
    """

    pinned: Mapping[str, int] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    apart: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def named(self) -> Mapping[str, Shard]:
        """Every table and part that a constraint names, by name."""
        names = itertools.chain(self.pinned, *self.together, *self.apart)
        return {name: Shard(name) for name in names}

    def holders(self, shards: Sequence[Shard]) -> dict[str, list[int]]:
        """Returns, by constrained name, the indices of shards that overlap it, because a constraint on a table binds
        its parts, and the reverse. PlanError if there are none."""
        numbers = {name: [i for i, s in enumerate(shards) if s & part] for name, part in self.named.items()}
        for name, own in numbers.items():
            if not own:
                raise PlanError(f"a constraint names table '{name}', which the model does not have.")
        return numbers

    def have_cut(self, shards: Sequence[Shard]) -> bool:
        """Whether shards are cut at the borders of all named parts."""
        return all(s & part in (None, s) for part in self.named.values() if part.columns for s in shards)

    def bind(self, shard: Shard) -> bool:
        """Whether a pin or a `together` group names the shard, or overlaps it."""
        return any(shard & self.named[name] for name in itertools.chain(self.pinned, *self.together))

    @cached_property
    def cuts(self) -> Mapping[str, frozenset[int]]:
        """The columns at which named parts begin and end, by table."""
        cuts: dict[str, set[int]] = {}
        for shard in self.named.values():
            if shard.columns is not None:
                cuts.setdefault(shard.table, set()).update(shard.columns)
        return {table: frozenset(columns) for table, columns in cuts.items()}

    def pieces(self, table: TableConfig) -> tuple[TableConfig, ...]:
        """Returns the table, or a part, cut into pieces at these columns; whole if none is inside."""
        start, stop = table.columns
        within = sorted(cut for cut in self.cuts.get(table.shard.table, ()) if start < cut < stop)
        return tuple(table.part(*columns) for columns in itertools.pairwise([start, *within, stop]))

    def check(self, tables: Sequence[TableConfig], max_parts: int, splits_allowed: bool) -> None:
        """Raises PlanError if constraints contradict each other, or name parts that these tables cannot be cut into.
        splits_allowed: False under row-wise Adagrad with one sum per row."""
        of = {table.name: table for table in tables}
        groups = {"pinned": [tuple(self.pinned)], "together": self.together, "apart": self.apart}
        for key, names in groups.items():
            for name in itertools.chain(*names):
                if self.named[name].rows is not None:
                    raise PlanError(f"{key} names '{name}', a range of rows; name its table or columns instead.")
                try:
                    if (table := of.get(self.named[name].table)) is not None:
                        table.holding(self.named[name])
                except UserError as error:
                    raise PlanError(f"{key} names '{name}', but {error}") from error
        for one, other in itertools.combinations(self.pinned, 2):
            if self.pinned[one] != self.pinned[other] and self.named[one] & self.named[other]:
                raise PlanError(
                    f"pinned puts '{one}' on rank {self.pinned[one]}, but '{other}' on rank {self.pinned[other]}, and "
                    "they have columns in common. Leave one of them out."
                )
        for one, other in itertools.chain(*(itertools.combinations(group, 2) for group in self.apart)):
            if self.named[one] & self.named[other]:
                raise PlanError(
                    f"apart names '{one}' and '{other}' in one group, but they have columns in common and cannot be on "
                    "different ranks. Leave one of them out."
                )
        for table in tables:
            parts = [piece.name for piece in self.pieces(table)]
            if len(parts) > 1 and not table.may_split(splits_allowed):
                name = next(name for name, part in self.named.items() if part.table == table.name and part.columns)
                raise PlanError(
                    f"a constraint names '{name}', a part of a table, but tables cannot be split: row-wise Adagrad "
                    "keeps one sum of squares per row over all columns. Set tables.optimizer.per_part: true for a sum "
                    f"per row and part, which is another optimizer; or use adagrad, or name the whole '{table.name}'."
                )
            if len(parts) > max(1, max_parts):
                raise PlanError(
                    f"constraints cut table '{table.name}' into {len(parts)} parts ({', '.join(parts)}), but "
                    f"autoshard.splits.max_parts is {max_parts}. Raise it, or name fewer parts."
                )


@dataclass(frozen=True)
class Splits:
    """Which tables may be split, and how.

    max_parts: most parts of a table split by columns; 1: no splits. min_dim: fewest columns of a part. rows: split a
    table by rows, into as many parts as needed, if it fits no rank otherwise. rows_to_balance: split by rows for
    balance too, if that is surely faster than by columns. allowed: False if parts would train another model (each with
    its own row-wise Adagrad); results then say what splits would gain. optimizer: the tables'; parts carry its state.
    """

    max_parts: int = 1
    min_dim: int = 16
    allowed: bool = True
    optimizer: TableOptimizer = "rowwise_adagrad"
    rows: bool = False
    rows_to_balance: bool = False

    @property
    def to_balance(self) -> bool:
        """Whether tables may be split to balance ranks, not only to fit their memory."""
        return self.max_parts > 1 and (self.allowed or self.rows_to_balance)

    def settings_for(self, shards: Iterable[TableConfig]) -> str:
        """Returns the settings to change, as text, for a plan with these shards to be allowed."""
        dims: dict[str, list[int]] = {}
        for shard in shards:
            dims.setdefault(shard.shard.table, []).append(shard.embedding_dim)
        split = [of_table for of_table in dims.values() if len(of_table) > 1]
        parts, narrowest = max(map(len, split)), min(map(min, split))
        other = {
            "tables.optimizer.per_part: true (or use sgd)": not self.allowed,
            f"autoshard.splits.max_parts: {parts}": parts > self.max_parts,
            f"autoshard.splits.min_dim: {narrowest}": narrowest < self.min_dim,
        }
        return " and ".join(setting for setting, differs in other.items() if differs)


def round_robin(names: Sequence[str], topology: Topology) -> ShardingPlan:
    """Puts tables on the usable ranks in turn, without regard to memory or cost."""
    ranks = topology.usable_ranks
    return ShardingPlan({name: ranks[i % len(ranks)] for i, name in enumerate(names)}, topology.world_size)


def check_plan(
    plan: ShardingPlan,
    table_bytes: Mapping[str, int],
    topology: Topology,
    constraints: Constraints = Constraints(),
) -> None:
    """Raises PlanError if `plan` exceeds a rank's memory, or breaks an exclusion or a constraint. table_bytes: by
    shard."""
    plan.check_tables(table_bytes)
    if plan.world_size != topology.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, but this job has {topology.world_size}. "
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
            raise PlanError(f"tables {some_of(group)} must stay together but are on several ranks.")
    for group in constraints.apart:
        owners = [rank for table in group for rank in plan.ranks_of(table)]
        if len(set(owners)) < len(owners):
            raise PlanError(f"tables {some_of(group)} must stay apart but two of them share a rank.")
    if topology.memory_bytes is not None:
        used = bytes_per_rank(plan, table_bytes)
        for rank, (need, free) in enumerate(zip(used, topology.memory_bytes, strict=True)):
            if need > free:
                raise PlanError(
                    f"rank {rank} needs {gib(need)} for its {len(plan.shards_on(rank))} tables but has {gib(free)} "
                    f"({gib(need - free)} short). Add ranks, raise autoshard.memory_gib, or shrink its largest tables."
                )
