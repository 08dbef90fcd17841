"""A placement problem, and the units that are placed.

task = PlacementTask.build(tables, stats, topology, batch_size=4096)
task.units.members                       # ((0,), (1, 4), (2,), ...): tables 1 and 4 must stay together
task.plan_from(np.array([0, 1, 0, ...])) # a rank per unit -> ShardingPlan
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.plan import Constraints, PlanError, ShardingPlan, Splits, Topology, check_plan, shard_tables
from dlrm_autoshard.plan.cuts import Piece, pieces_of
from dlrm_autoshard.planner.units import Units, units_of
from dlrm_autoshard.tables import Shard, TableConfig, TableStats, memory_bytes, part_of, stats_of_part, stats_of_whole

__all__ = ["MeasureTask", "PlacementTask", "Splits"]

# Axes: T tables, U units, W ranks.


@dataclass(frozen=True)
class PlacementTask:
    """Tables with statistics, ranks and constraints. batch_size: global. tables: whole tables or shards, which are what
    algorithms place.

    Tables that must stay together form one unit, so that algorithms need not know of such groups: bytes, costs and
    network embeddings of a unit are sums over its tables. Other constraints (pins, exclusions, groups kept apart,
    memory) become `Room.legal_W`, the mask that every algorithm obeys.
    """

    tables: tuple[TableConfig, ...]
    stats: tuple[TableStats, ...]
    topology: Topology
    batch_size: int
    table_bytes: Mapping[str, int]
    constraints: Constraints = field(default_factory=Constraints)
    splits: Splits = field(default_factory=Splits)

    @staticmethod
    def build(
        tables: Sequence[TableConfig],
        stats: Sequence[TableStats],
        topology: Topology,
        *,
        batch_size: int,
        table_bytes: Mapping[str, int] | None = None,
        constraints: Constraints = Constraints(),
        splits: Splits = Splits(),
    ) -> PlacementTask:
        """Makes a task. table_bytes: default weights, optimizer state and exchange buffers."""
        if not tables:
            raise PlanError("there are no tables to place.")
        if len(tables) != len(stats):
            raise PlanError(f"{len(tables)} tables come with {len(stats)} statistics; each table needs its own.")
        if len({table.name for table in tables}) < len(tables):
            raise PlanError("two tables have the same name; a plan needs distinct names.")
        constraints.check(tables, splits.max_parts, splits.allowed)
        if table_bytes is None:
            table_bytes = memory_bytes(tables, stats, splits.optimizer, batch_size)
        return PlacementTask(tuple(tables), tuple(stats), topology, batch_size, table_bytes, constraints, splits)

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @cached_property
    def names(self) -> tuple[Shard, ...]:
        return tuple(table.shard for table in self.tables)

    @cached_property
    def units(self) -> Units:
        bytes_T = np.array([self.table_bytes[name] for name in self.names], dtype=np.int64)
        return units_of(self.names, bytes_T, self.topology, self.constraints)

    def plan_from(self, rank_U: np.ndarray) -> ShardingPlan:
        """Makes a plan from a rank per unit; neighbouring shards on one rank become one, unless a constraint cuts
        there."""
        placed: list[tuple[TableConfig, int]] = []
        for shard, rank in zip(self.tables, map(int, rank_U[self.units.unit_of_T]), strict=True):
            cut = shard.columns[0] in self.constraints.cuts.get(shard.shard.table, ())
            whole, _ = self._whole_of[shard.shard.table]
            joined = None if not placed or placed[-1][1] != rank or cut else whole.joined(placed[-1][0], shard)
            if joined is not None:
                placed.pop()
            placed.append((joined or shard, rank))
        return ShardingPlan({shard.name: rank for shard, rank in placed}, self.world_size)

    def ranks_from(self, plan: ShardingPlan) -> np.ndarray:
        """Returns the rank of each unit in `plan`, which must be legal and have this task's shards."""
        self.check(plan)
        return np.array([plan.rank_of[self.tables[members[0]].name] for members in self.units.members])

    def check(self, plan: ShardingPlan) -> None:
        check_plan(plan, self.split_as(plan).table_bytes, self.topology, self.constraints)

    def allows(self, plan: ShardingPlan) -> bool:
        try:
            self.check(plan)
        except PlanError:
            return False
        return True

    def splits_enough(self, plan: ShardingPlan) -> bool:
        """Returns whether the plan splits tables no further than allowed; plans of other settings may."""
        may = all(self.shards_of[name][0][0].may_split(self.splits.allowed) for name in plan.column_split_tables)
        by_rows = plan.row_split_tables
        most = max((len(plan.parts_of(name)) for name in plan.split_tables if name not in by_rows), default=1)
        return may and most <= max(1, self.splits.max_parts) and (self.splits.rows or not by_rows)

    @cached_property
    def unconstrained(self) -> PlacementTask:
        """The same tables and ranks without constraints, for predicting costs."""
        topology = replace(self.topology, memory_bytes=None, excluded=frozenset())
        return replace(self, topology=topology, constraints=Constraints())

    # -- shards --------------------------------------------------------------------------------------------------------

    @cached_property
    def shards_of(self) -> Mapping[str, Sequence[tuple[TableConfig, TableStats]]]:
        """Returns the shards of each table here, with statistics, by the table's name."""
        found: dict[str, list[tuple[TableConfig, TableStats]]] = {}
        for table, stat in zip(self.tables, self.stats, strict=True):
            found.setdefault(table.shard.table, []).append((table, stat))
        return found

    @cached_property
    def _whole_of(self) -> Mapping[str, tuple[TableConfig, TableStats]]:
        found = {}
        for name, shards in self.shards_of.items():
            (part, stat), parts = shards[0], [part for part, _ in shards]
            dim, rows = max(part.columns[1] for part in parts), max(part.rows[1] for part in parts)
            whole = replace(part, name=name, embedding_dim=dim, num_embeddings=rows)
            found[name] = whole, stats_of_whole(part, whole, stat)
        return found

    @property
    def wholes(self) -> tuple[TableConfig, ...]:
        """The whole tables that these are, or are shards of."""
        return tuple(table for table, _ in self._whole_of.values())

    def shard(self, name: Shard) -> tuple[TableConfig, TableStats]:
        """Returns a table, or a shard of one, by name, with its statistics."""
        return part_of(name, self._whole_of)

    def has(self, table: TableConfig) -> bool:
        """Returns whether it is one of these tables, or a shard of one."""
        whole, _ = self._whole_of.get(table.shard.table, (None, None))
        within = whole is not None and table.columns[1] <= whole.embedding_dim and table.rows[1] <= whole.num_embeddings
        return whole is not None and within and table == whole.holding(table.shard)

    def with_shards(self, shards: Sequence[TableConfig]) -> PlacementTask:
        """Returns the task for these shards of its tables. A shard's memory is a share of its table's."""
        stats, table_bytes = [], {}
        for shard in shards:
            like, stat_of_like = self.shards_of[shard.shard.table][0]
            stat = stats_of_part(shard, *self._whole_of[shard.shard.table])
            both = [*memory_bytes([shard], [stat], self.splits.optimizer, self.batch_size).values()]
            both += memory_bytes([like], [stat_of_like], self.splits.optimizer, self.batch_size).values()
            table_bytes[shard.name] = -(-self.table_bytes[like.name] * both[0] // both[1])
            stats.append(stat)
        return replace(self, tables=tuple(shards), stats=tuple(stats), table_bytes=table_bytes)

    def split_as(self, plan: ShardingPlan) -> PlacementTask:
        """Returns the task for the shards that `plan` places."""
        if set(plan.rank_of) == set(self.table_bytes):
            return self
        return self.with_shards(shard_tables(self.wholes, plan))

    @property
    def cut(self) -> PlacementTask:
        """The task with a separate shard for each one that a constraint names."""
        pieces = [piece for table in self.tables for piece in self.constraints.pieces(table)]
        return self if len(pieces) == len(self.tables) else self.with_shards(pieces)

    def covering(self, plans: Sequence[ShardingPlan]) -> PlacementTask:
        """Returns the task without constraints and with all shards of these plans, to compare plans with different
        splits."""
        names = set().union(*(plan.rank_of for plan in plans))
        if names <= set(self.table_bytes):
            return self.unconstrained
        shards = dict.fromkeys(shard for plan in plans for shard in shard_tables(self.wholes, plan))
        return self.unconstrained.with_shards(list(shards))

    def placed(self, plan: ShardingPlan) -> np.ndarray:
        """Returns the rank [U] of each unit in `plan`, legal or not; -1 for shards that it lacks."""
        return np.array([plan.rank_of.get(self.tables[members[0]].name, -1) for members in self.units.members])

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The tables cut where constraints allow it, down to what must share a rank."""
        return pieces_of(self.tables, self._whole_of.values(), self.constraints)

    def halves(self, shard: Shard, *, rows: bool = False) -> tuple[TableConfig, TableConfig] | None:
        """Halves the shard; None if its table has enough shards, halves would be too narrow, or a constraint
        binds it. rows: halve by rows, without a limit on the number of shards."""
        table, _ = self.shard(shard)
        if self.constraints.bind(shard):
            return None
        if rows:
            return table.halves_by_rows() if self.splits.rows else None
        few = len(self.shards_of[shard.table]) < self.splits.max_parts
        return table.halves(self.splits.min_dim) if few and table.may_split(True) else None

    def split(self, name: Shard, *, rows: bool = False) -> PlacementTask | None:
        halves, at = self.halves(name, rows=rows), self.names.index(name)
        return None if halves is None else self.with_shards([*self.tables[:at], *halves, *self.tables[at + 1 :]])


MeasureTask = Callable[[PlacementTask, Sequence[ShardingPlan]], list[StepProfile]]
"""Type of a function that measures plans of a task."""
