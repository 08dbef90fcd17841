"""A simulated cluster whose shard costs are interpolated between recorded fbgemm shards.

cluster = RecordedCluster(tables, seed=0)
cluster.profile(stats, plan, batch_size)             # a StepProfile, 'simulated'
cluster.step_ms(stats, plan, batch_size)             # exact
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from dlrm_autoshard.benchmarks.cost_oracle import Noise
from dlrm_autoshard.costs import COMPUTE, EXCHANGE, RankCost, StepProfile
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.costs.features import work
from dlrm_autoshard.planner.costs.least_squares import fit_nonnegative
from dlrm_autoshard.planner.costs.replay import ShardSample
from dlrm_autoshard.probe.shard_probe import ShardTime
from dlrm_autoshard.probe.shipped_costs import SHIPPED, read_samples
from dlrm_autoshard.tables import Shard, TableConfig, TableStats

MACHINE, NEIGHBOURS, HIDDEN_SPREAD = "amd_epyc", 8, 0.2
LATENCY_MS, MB_PER_MS = 0.2, 1.5
DENSE_MS = 10.0  # of the dense part, equal on all ranks


@cache
def _recorded() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns prices [P, 2], and the recorded shards' log work [N, P] and log residuals [N, 2]."""
    samples = [s for s in read_samples(SHIPPED / f"{MACHINE}.npz") if isinstance(s, ShardSample)]
    work_NP = np.array([work(s.tables, s.stats, s.batch_size).sum(axis=0) for s in samples])
    ms_N2 = np.array([[s.fwd_compute_ms, s.bwd_compute_ms] for s in samples])
    weight_N, prior_P = np.ones(len(samples)), np.zeros(work_NP.shape[1])
    prices_P2 = np.stack([fit_nonnegative(work_NP, ms_N2[:, i], weight_N, prior_P, 1e-3) for i in (0, 1)], axis=1)
    return prices_P2, np.log(work_NP + 1e-6), np.log(ms_N2 / (work_NP @ prices_P2))


class RecordedCluster(Noise):
    """Simulated ranks. slowdown: how many times as long a rank computes, by rank.

    A shard costs what non-negative prices fitted to all recorded shards say, times the residual of the eight most
    similar ones. Each table has a hidden factor (20%) that the planner, fitted to the same records, has to find. An
    exchange takes 0.2 ms times log2 of twice the ranks, and moves 1.5 GB/s a rank for the rank with most dims.
    """

    def __init__(self, tables: Sequence[TableConfig], seed: int, noise: float = 0.02) -> None:
        super().__init__(noise, seed)
        self.tables = tuple(tables)
        self.slowdown: dict[int, float] = {}
        hidden = np.random.default_rng([seed, 2])
        self._hidden_T = np.exp(HIDDEN_SPREAD * hidden.standard_normal(len(self.tables)))

    def compute_ms(self, stats: Sequence[TableStats], batch_size: int, shard: Sequence[int]) -> np.ndarray:
        """Returns [2] exact ms of a fused shard, forward and backward."""
        if not len(shard):
            return np.zeros(2)
        prices_P2, log_NP, residual_N2 = _recorded()
        work_TP = work([self.tables[i] for i in shard], [stats[i] for i in shard], batch_size)
        apart_N = np.abs(log_NP - np.log(work_TP.sum(axis=0) + 1e-6)).mean(axis=1)
        nearest = np.argpartition(apart_N, NEIGHBOURS)[:NEIGHBOURS]
        weight = 1 / (apart_N[nearest] + 1e-3)
        beside_2 = np.exp(weight @ residual_N2[nearest] / weight.sum())
        ms_2: np.ndarray = (self._hidden_T[list(shard)] @ (work_TP @ prices_P2)) * beside_2
        return ms_2

    def stages_ms(self, stats: Sequence[TableStats], plan: ShardingPlan, batch_size: int) -> np.ndarray:
        """Returns [W, 4] exact ms of each rank's stages."""
        shards = [[i for i, t in enumerate(self.tables) if plan.rank_of[t.name] == r] for r in range(plan.world_size)]
        compute_W2 = np.array(
            [self.compute_ms(stats, batch_size, s) * self.slowdown.get(r, 1.0) for r, s in enumerate(shards)]
        )
        dims_W = np.array([sum(self.tables[i].embedding_dim for i in shard) for shard in shards])
        mb = 4e-6 * batch_size / plan.world_size
        sent = dims_W.max() * (plan.world_size - 1) * mb
        received = (dims_W.sum() - dims_W.min()) * mb
        exchange_ms = LATENCY_MS * np.log2(2 * plan.world_size) + max(sent, received) / MB_PER_MS
        exchange_W = np.full(plan.world_size, exchange_ms)
        return np.column_stack([compute_W2[:, 0], exchange_W, exchange_W, compute_W2[:, 1]])

    def step_ms(self, stats: Sequence[TableStats], plan: ShardingPlan, batch_size: int) -> float:
        return float(self.stages_ms(stats, plan, batch_size).max(axis=0).sum())

    def profile(self, stats: Sequence[TableStats], plan: ShardingPlan, batch_size: int) -> StepProfile:
        ranks = tuple(RankCost(*row) for row in self.measured(self.stages_ms(stats, plan, batch_size)).tolist())
        slow_W = np.array([self.slowdown.get(rank, 1.0) for rank in range(plan.world_size)])
        dense = tuple((DENSE_MS * self.measured(slow_W)).tolist())
        return StepProfile(
            plan, self.tables, tuple(stats), batch_size, ranks, "simulated", self.noise_iqr, dense_ms=dense
        )

    def measure_shards(
        self, stats: Sequence[TableStats], batch_size: int, shards: Sequence[Sequence[Shard]]
    ) -> list[ShardTime]:
        number = {table.name: i for i, table in enumerate(self.tables)}
        exact = np.array([self.compute_ms(stats, batch_size, [number[n] for n in shard]) for shard in shards])
        return [ShardTime(forward, backward, self.noise_iqr, 1) for forward, backward in self.measured(exact).tolist()]


class Disturbed:
    """Noise of sampled steps: 2% of each stage independently, or as measured on two shared cores (`real`).

    Real noise correlates a rank's stages of one step by 0.72, has one step in ten beyond three robust standard
    deviations, and has slow moments of a rank (3%) and of the machine (4%) that last for a hundred steps.
    """

    def __init__(self, seed: int, world_size: int, real: bool) -> None:
        self._draw, self._ranks, self._real = np.random.default_rng([seed, 3]), world_size, real
        self.machine, self._rank_W1 = 1.0, np.ones((world_size, 1))

    def next_moment(self) -> None:
        if self._real:
            self.machine = float(np.exp(0.04 * self._draw.standard_normal()))
            self._rank_W1 = np.exp(0.03 * self._draw.standard_normal((self._ranks, 1)))

    def step(self, exact_W4: np.ndarray) -> np.ndarray:
        """Returns [W, 4] as one sampled step shows them."""
        draw, own_W4 = self._draw, self._draw.standard_normal(exact_W4.shape)
        if not self._real:
            return exact_W4 * np.exp(0.02 * own_W4)
        shared_W1 = draw.standard_normal((self._ranks, 1))
        tail_W1 = draw.exponential(6.0, (self._ranks, 1)) * (draw.random((self._ranks, 1)) < 0.15)
        away_W4 = 0.85 * shared_W1 + 0.53 * own_W4 + tail_W1
        away_W4[:, EXCHANGE] = own_W4[:, EXCHANGE]  # exchanges end on all ranks at once
        noisy: np.ndarray = exact_W4 * np.exp(0.03 * away_W4) * self.machine
        noisy[:, COMPUTE] *= self._rank_W1
        return noisy

    def dense(self, slow_W: np.ndarray) -> np.ndarray:
        """Returns [W] ms of the dense part, which follows a slow rank by 0.75 of the logarithm."""
        noise_W = np.exp((0.05 if self._real else 0.02) * self._draw.standard_normal(self._ranks))
        dense: np.ndarray = DENSE_MS * self.machine * (slow_W**0.75 * self._rank_W1.ravel() ** 0.75) * noise_W
        return dense
