"""Measures whole plans in a single process, for any number of ranks.

probe = IsolatedProbe(tables, stats, batch_size, ShardProbe(), exchange)
probe.measure([plan])                           # StepProfiles, source 'probe'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dlrm_autoshard.costs import RankCost, StepProfile
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.costs.exchange_model import ExchangeModel
from dlrm_autoshard.probe.shard_probe import ShardProbe, ShardTime, median_time, spread_of_times
from dlrm_autoshard.tables import Shard, TableConfig, TableStats, part_of


class IsolatedProbe:
    """Measures each rank's shards one after another on this core or GPU, and models exchanges. Remembers measured
    shards.

    rounds: measurements of each new shard, interleaved with the others; the median counts.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        stats: Sequence[TableStats],
        batch_size: int,
        probe: ShardProbe,
        exchange: ExchangeModel,
        rounds: int = 1,
    ) -> None:
        self.tables, self.stats, self.batch_size = tuple(tables), tuple(stats), batch_size
        self._probe, self._exchange, self._rounds = probe, exchange, rounds
        self._pairs = {table.name: (table, stat) for table, stat in zip(tables, stats, strict=True)}
        self._position = {table.name: position for position, table in enumerate(tables)}
        self.shard_times: dict[frozenset[Shard], list[ShardTime]] = {}

    def measure(self, plans: Sequence[ShardingPlan]) -> list[StepProfile]:
        wanted = {frozenset(plan.shards_on(rank)) for plan in plans for rank in range(plan.world_size)}
        missing = sorted(map(sorted, wanted - set(self.shard_times)))
        for _ in range(self._rounds):
            self.measure_shards(missing)
        return [self.profile(plan) for plan in plans]

    def measure_shards(self, shards: Sequence[Sequence[Shard]]) -> list[ShardTime]:
        """Measures each shard with `measure_shard`; usable as a start's `ShardTimer`."""
        return [self.measure_shard(shard) for shard in shards]

    def measure_shard(self, names: Iterable[Shard]) -> ShardTime:
        """Measures a shard once more; all repetitions are kept, and their median counts."""
        wanted = frozenset(names)
        chosen = [part_of(name, self._pairs) for name in sorted(wanted, key=self._order)]
        wholes = [self._pairs[t.shard.table][0] for t, _ in chosen]
        measured = self._probe.measure([t for t, _ in chosen], [s for _, s in chosen], self.batch_size, wholes)
        self.shard_times.setdefault(wanted, []).append(measured)
        return measured

    def profile(self, plan: ShardingPlan) -> StepProfile:
        """Returns the plan's profile from the measurements of its shards."""
        pairs = [[part_of(name, self._pairs) for name in plan.shards_on(rank)] for rank in range(plan.world_size)]
        dims = np.array([sum(table.embedding_dim * stat.features for table, stat in own) for own in pairs])
        forward_ms, backward_ms = self._exchange.ms(dims.astype(np.float64), self.batch_size)
        ranks, noise = [], 0.0
        for rank in range(plan.world_size):
            times = self.shard_times[frozenset(plan.shards_on(rank))]
            one = median_time(times)
            ranks.append(RankCost(one.fwd_compute_ms, float(forward_ms), float(backward_ms), one.bwd_compute_ms))
            noise = max(noise, spread_of_times(times), one.noise)
        return StepProfile(plan, self.tables, self.stats, self.batch_size, tuple(ranks), "probe", noise)

    def _order(self, shard: Shard) -> tuple[int, tuple[int, int], tuple[int, int]]:
        return self._position[shard.table], shard.rows or (0, 0), shard.columns or (0, 0)
