"""One placement problem, and the units it really places.

task = PlacementTask.build(tables, stats, topology, batch_size=4096)
task.units.members                       # ((0,), (1, 4), (2,), ...): tables 1 and 4 must stay together
task.plan_from(np.array([0, 1, 0, ...])) # one rank a unit -> ShardingPlan
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from dlrm_autoshard.plan import Constraints, PlanError, ShardingPlan, Topology, check_plan, is_legal
from dlrm_autoshard.tables import TableConfig, TableStats, memory_bytes

# Axes: T tables, U units, W ranks.

UNLIMITED = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class Units:
    """What is placed: `members[u]` are table numbers; `rivals[u]` are units that may not share u's rank."""

    members: tuple[tuple[int, ...], ...]
    unit_of_T: np.ndarray
    bytes_U: np.ndarray
    allowed_UW: np.ndarray
    capacity_W: np.ndarray
    rivals: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.members)

    def sum_over_tables(self, values_TK: np.ndarray) -> np.ndarray:
        """[T, K] (or [T]) of tables -> [U, K] (or [U]) of units."""
        summed: np.ndarray = np.zeros((len(self), *values_TK.shape[1:]), dtype=values_TK.dtype)
        np.add.at(summed, self.unit_of_T, values_TK)
        return summed


@dataclass(frozen=True)
class PlacementTask:
    """Tables, what the data does to them, the ranks, and what is asked. `batch_size` is the global batch.

    Tables that must stay together are merged into one unit, so that no algorithm has to know of such groups: bytes,
    costs and network embeddings of a unit are sums over its tables. What else is asked (pins, exclusions, groups kept
    apart, memory) becomes `Room.legal_W`, the one mask that every algorithm obeys.
    """

    tables: tuple[TableConfig, ...]
    stats: tuple[TableStats, ...]
    topology: Topology
    batch_size: int
    table_bytes: Mapping[str, int]
    constraints: Constraints = field(default_factory=Constraints)

    @staticmethod
    def build(
        tables: Sequence[TableConfig],
        stats: Sequence[TableStats],
        topology: Topology,
        *,
        batch_size: int,
        table_bytes: Mapping[str, int] | None = None,
        constraints: Constraints = Constraints(),
    ) -> PlacementTask:
        """`table_bytes` defaults to weights, row-wise Adagrad's state and exchange buffers."""
        if not tables:
            raise PlanError("there are no tables to place.")
        if len(tables) != len(stats):
            raise PlanError(f"{len(tables)} tables come with {len(stats)} statistics; each table needs its own.")
        if len({table.name for table in tables}) < len(tables):
            raise PlanError("two tables have the same name; a plan needs distinct names.")
        if table_bytes is None:
            table_bytes = memory_bytes(tables, stats, "rowwise_adagrad", batch_size)
        return PlacementTask(tuple(tables), tuple(stats), topology, batch_size, table_bytes, constraints)

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(table.name for table in self.tables)

    @cached_property
    def units(self) -> Units:
        return _merge(self)

    def plan_from(self, rank_U: np.ndarray) -> ShardingPlan:
        ranks_T = rank_U[self.units.unit_of_T]
        return ShardingPlan({name: int(rank) for name, rank in zip(self.names, ranks_T, strict=True)}, self.world_size)

    def ranks_from(self, plan: ShardingPlan) -> np.ndarray:
        """Rank of each unit in `plan`, which must satisfy this task."""
        self.check(plan)
        return np.array([plan.rank_of[self.tables[members[0]].name] for members in self.units.members])

    def check(self, plan: ShardingPlan) -> None:
        check_plan(plan, self.table_bytes, self.topology, self.constraints)

    @cached_property
    def unconstrained(self) -> PlacementTask:
        """The same tables on the same ranks, with any placement legal: what costs are predicted for."""
        topology = replace(self.topology, memory_bytes=None, excluded=frozenset())
        return replace(self, topology=topology, constraints=Constraints())

    def allows(self, plan: ShardingPlan) -> bool:
        return is_legal(plan, self.table_bytes, self.topology, self.constraints)


class Room:
    """A placement in the making: what is free on each rank, and where a unit may go."""

    def __init__(self, units: Units, rank_U: np.ndarray | None = None) -> None:
        self.units = units
        self.rank_U = np.full(len(units), -1) if rank_U is None else rank_U.copy()
        placed = self.rank_U >= 0
        self.free_W = units.capacity_W.copy()
        np.subtract.at(self.free_W, self.rank_U[placed], units.bytes_U[placed])

    def legal_W(self, unit: int) -> np.ndarray:
        """Ranks that may take `unit` now."""
        legal: np.ndarray = self.units.allowed_UW[unit] & (self.free_W >= self.units.bytes_U[unit])
        for rival in self.units.rivals[unit]:
            if self.rank_U[rival] >= 0:
                legal[self.rank_U[rival]] = False
        return legal

    def place(self, unit: int, rank: int) -> None:
        self.rank_U[unit] = rank
        self.free_W[rank] -= self.units.bytes_U[unit]

    def remove(self, unit: int) -> int:
        rank = int(self.rank_U[unit])
        self.rank_U[unit] = -1
        self.free_W[rank] += self.units.bytes_U[unit]
        return rank


def _merge(task: PlacementTask) -> Units:
    number = {table.name: i for i, table in enumerate(task.tables)}
    constraints, topology = task.constraints, task.topology
    for name in [*constraints.pinned, *(n for group in (*constraints.together, *constraints.apart) for n in group)]:
        if name not in number:
            raise PlanError(f"a constraint names table '{name}', which the model does not have.")

    leader = list(range(len(task.tables)))

    def find(i: int) -> int:
        while leader[i] != i:
            i = leader[i]
        return i

    for group in constraints.together:
        for name in group[1:]:
            a, b = find(number[group[0]]), find(number[name])
            leader[max(a, b)] = min(a, b)
    roots = [find(i) for i in range(len(task.tables))]
    unit_of_root = {root: unit for unit, root in enumerate(sorted(set(roots)))}
    unit_of_T = np.array([unit_of_root[root] for root in roots])
    members: list[list[int]] = [[] for _ in unit_of_root]
    for table, unit in enumerate(unit_of_T):
        members[unit].append(table)

    allowed_UW = np.ones((len(members), topology.world_size), dtype=bool)
    allowed_UW[:, sorted(topology.excluded)] = False
    for name, rank in constraints.pinned.items():
        if not 0 <= rank < topology.world_size:
            raise PlanError(f"table '{name}' is pinned to rank {rank}, but there are {topology.world_size} ranks.")
        if rank in topology.excluded:
            raise PlanError(f"table '{name}' is pinned to rank {rank}, which is excluded.")
        row = allowed_UW[unit_of_T[number[name]]]
        row[np.arange(topology.world_size) != rank] = False
        if not row.any():
            raise PlanError(
                f"table '{name}' is pinned to rank {rank}, but must stay together with one pinned elsewhere."
            )

    rivals: list[set[int]] = [set() for _ in members]
    for group in constraints.apart:
        units = [int(unit_of_T[number[name]]) for name in group]
        if len(set(units)) < len(group):
            raise PlanError(f"tables {', '.join(group)} must stay apart, but two of them must also stay together.")
        if len(group) > len(topology.usable_ranks):
            raise PlanError(
                f"{len(group)} tables must stay apart, but only {len(topology.usable_ranks)} ranks can own tables."
            )
        for unit in units:
            rivals[unit].update(set(units) - {unit})

    bytes_T = np.array([task.table_bytes[table.name] for table in task.tables], dtype=np.int64)
    bytes_U = np.zeros(len(members), dtype=np.int64)
    np.add.at(bytes_U, unit_of_T, bytes_T)
    capacity = topology.memory_bytes
    return Units(
        members=tuple(tuple(unit) for unit in members),
        unit_of_T=unit_of_T,
        bytes_U=bytes_U,
        allowed_UW=allowed_UW,
        capacity_W=np.full(topology.world_size, UNLIMITED) if capacity is None else np.array(capacity, dtype=np.int64),
        rivals=tuple(tuple(sorted(units)) for units in rivals),
    )
