"""Simulates a cluster by arithmetic: returns StepProfiles as real ranks do, labelled 'simulated'.

    cluster = SimulatedCluster(seed=0)
    profile = cluster.profile(tables, stats, plan, batch_size=4096)

For tests and for timing planners; it predicts no hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dlrm_autoshard.costs import RankCost, StepProfile
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.costs.features import work
from dlrm_autoshard.tables import TableConfig, TableStats


class SimulatedCluster:
    """A simulated cluster. slowdown[rank]: factor on its compute. noise: relative standard deviation of a measurement.

    It models what makes placement hard: tables on a rank compete for its cache (so a shard costs more than the sum of
    its tables), hot rows are cheap (reuse), backward sorts ids, exchanges have latency and bandwidth, ranks differ in
    speed, and measurements are noisy.
    """

    def __init__(self, seed: int = 0, noise: float = 0.0, slowdown: dict[int, float] | None = None) -> None:
        hidden = np.random.default_rng([seed, 1])
        self.noise_generator = np.random.default_rng([seed, 2])
        self.noise = noise
        self.slowdown = slowdown or {}
        self.launch_ms = hidden.uniform(0.02, 0.06)
        self.id_ns = hidden.uniform(3, 6)
        self.hit_ns_per_byte = hidden.uniform(0.02, 0.03)
        self.miss_ns_per_byte = hidden.uniform(0.15, 0.25)
        self.cache_mib = hidden.uniform(8, 24)
        self.sort_ns = hidden.uniform(1.0, 2.0)
        self.update_ns_per_byte = hidden.uniform(0.2, 0.35)
        self.latency_ms = hidden.uniform(0.1, 0.3)
        self.mb_per_ms = hidden.uniform(1.5, 3.0)

    def profile(
        self, tables: Sequence[TableConfig], stats: Sequence[TableStats], plan: ShardingPlan, batch_size: int
    ) -> StepProfile:
        bare = StepProfile(plan, tuple(tables), tuple(stats), batch_size, (), source="simulated", noise=self.noise)
        plan.check_tables(table.name for table in tables)
        shards, stats_of = bare.shards
        rank_T = np.array([plan.rank_of[shard.name] for shard in shards])
        done_TP = work(shards, stats_of, batch_size)
        dims_T = np.array([float(t.embedding_dim * s.features) for t, s in zip(shards, stats_of, strict=True)])
        own_W = [dims_T[rank_T == rank].sum() for rank in range(plan.world_size)]
        # A collective ends for all ranks once the slowest has sent and received.
        exchange = max(self._exchange(own, dims_T.sum(), batch_size, plan.world_size) for own in own_W)
        ranks = []
        for rank in range(plan.world_size):
            mine = rank_T == rank
            forward, backward = self._compute(done_TP[mine])
            slower = self.slowdown.get(rank, 1.0)
            costs = np.array([forward * slower, exchange, 1.05 * exchange, backward * slower])
            costs *= np.exp(self.noise * self.noise_generator.standard_normal(4))
            ranks.append(RankCost(*(float(ms) for ms in costs)))
        return replace(bare, ranks=tuple(ranks))

    def _compute(self, done_TP: np.ndarray) -> tuple[float, float]:
        """Returns ms of fused forward and backward of one rank's tables."""
        if len(done_TP) == 0:
            return 0.0, 0.0
        pooled, ids, read, distinct, working_set = (done_TP[:, i] for i in (2, 3, 4, 5, 6))
        # All tables of the rank share the cache: what fits costs the hit price.
        cached = self.cache_mib / (self.cache_mib + working_set.sum() * 1e6 / 2**20)
        price = self.hit_ns_per_byte * cached + self.miss_ns_per_byte * (1 - cached)
        first_touch = self.miss_ns_per_byte * working_set
        lookups = self.id_ns * ids + price * (read - working_set).clip(0) + first_touch + 0.1 * pooled
        forward = self.launch_ms + 0.004 * len(done_TP) + lookups.sum()
        # Equal ids of all tables are grouped by one sort, then every distinct row is updated.
        all_ids = ids.sum()
        sorting = self.sort_ns * all_ids * np.log2(all_ids * 1e6 + 1) / 4
        updates = self.update_ns_per_byte * working_set.sum() + 20 * distinct.sum()
        backward = 2 * self.launch_ms + 0.008 * len(done_TP) + sorting + updates + 0.6 * lookups.sum()
        return float(forward), float(backward)

    def _exchange(self, own_dims: float, all_dims: float, batch_size: int, world_size: int) -> float:
        if world_size == 1:
            return 0.0
        mb_per_dim = 4e-6 * batch_size / world_size
        sent, received = own_dims * (world_size - 1) * mb_per_dim, (all_dims - own_dims) * mb_per_dim
        return float(self.latency_ms * np.log2(2 * world_size) + (sent + 0.4 * received) / self.mb_per_ms)
