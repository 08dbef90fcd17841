"""A simulated machine that the planner knows nothing of: GPU-like, fused, non-additive costs.

oracle = CostOracle(tables, stats, batch_size=65536, devices=4, seed=0)
oracle.step_ms(rank_T)                  # the exact cost: sum over stages of the slowest rank
oracle.profile(plan)                    # the same as synchronous ranks would report it, with noise
oracle.near_optimum(starts)             # the result of a long search on the exact costs
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from dlrm_autoshard.costs import RankCost, StepProfile
from dlrm_autoshard.plan import ShardingPlan, shard_tables
from dlrm_autoshard.probe.shard_probe import ShardTime
from dlrm_autoshard.tables import Shard, TableConfig, TableStats

# Independent of the planner: none of its features, prices or networks occur here. Tables have `hidden` factors that
# their statistics do not show, so that only measuring finds them. Axes: T tables, N sets of tables, W devices.

BYTES_PER_MS, CACHE_BYTES, BAGS_IN_FLIGHT = 1.2e9, 40e6, 1.5e5
LAUNCH_MS, TABLE_MS, SORT_MS_PER_MILLION = 0.03, 0.004, 0.12
HIDDEN_SPREAD = 0.25
"""Standard deviation of the logarithm of a table's cost beyond what its shape and statistics explain."""


class Noise:
    """Multiplies each measurement by a random factor."""

    def __init__(self, noise: float, seed: int) -> None:
        self.noise, self.noise_iqr = noise, 1.35 * noise
        self._noise = np.random.default_rng([seed, 1])

    def measured(self, exact_ms: np.ndarray) -> np.ndarray:
        return self.noisy(exact_ms, self._noise)

    def noisy(self, exact_ms: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        found: np.ndarray = exact_ms * np.exp(self.noise * generator.standard_normal(exact_ms.shape))
        return found


class CostOracle(Noise):
    """Exact costs of plans on one drawn machine; a seed draws its laws' hidden factors."""

    usual_noise = 0.02

    def __init__(
        self,
        tables: Sequence[TableConfig],
        stats: Sequence[TableStats],
        batch_size: int,
        devices: int,
        seed: int = 0,
        noise: float | None = None,
    ) -> None:
        super().__init__(self.usual_noise if noise is None else noise, seed)
        self.tables, self.stats, self.batch_size, self.devices = tuple(tables), tuple(stats), batch_size, devices
        self.seed, hidden = seed, np.random.default_rng([seed, 2])
        self._of_shards: dict[tuple[str, ...], CostOracle] = {}
        self._measured_before: Counter[str] = Counter()
        self.dim_T = np.array([table.embedding_dim for table in tables], dtype=np.float64)
        pooling_T = np.array([stat.mean_pooling for stat in stats])
        self.ids_T = pooling_T * batch_size
        # A warp reads 32 floats at a time: a row of 36 takes as long as one of 64.
        row_bytes_T = 4 * 32 * np.ceil(self.dim_T / 32)
        distinct_T = self.ids_T / np.array([stat.mean_reuse for stat in stats])
        self.unique_bytes_T = distinct_T * row_bytes_T
        wholes = list(dict.fromkeys(table.shard.table for table in tables))
        spread_R2 = np.exp(HIDDEN_SPREAD * hidden.standard_normal((len(wholes), 2)))
        spread_T2 = spread_R2[[wholes.index(table.shard.table) for table in tables]]
        self.read_ms_T = self.ids_T * row_bytes_T / BYTES_PER_MS * spread_T2[:, 0]
        self.update_ms_T = (2 * self.unique_bytes_T + 0.3 * self.ids_T * row_bytes_T) / BYTES_PER_MS * spread_T2[:, 1]
        self.write_ms_T = batch_size * 4 * self.dim_T / BYTES_PER_MS
        self.latency_ms, self.sent_ms, self.received_ms = hidden.uniform([0.05, 0.01, 0.005], [0.2, 0.03, 0.015])

    # -- costs ---------------------------------------------------------------------------------------------------------

    def compute_ms(self, inside_NT: np.ndarray) -> np.ndarray:
        """Returns [N, 2] ms of the fused forward and backward of each set of tables, given as a row of 0 and 1."""
        inside_NT = inside_NT.astype(np.float64)
        count_N = inside_NT.sum(axis=1)
        # All tables share the L2: what fits is read from there. Few bags leave most of the GPU idle.
        in_cache_N = CACHE_BYTES / (CACHE_BYTES + inside_NT @ self.unique_bytes_T)
        bags_N = count_N * self.batch_size
        idle_N = 1 + BAGS_IN_FLIGHT / np.maximum(bags_N, 1)
        forward_N = (inside_NT @ self.read_ms_T) * (1 - 0.7 * in_cache_N) + inside_NT @ self.write_ms_T
        million_N = inside_NT @ self.ids_T * 1e-6
        backward_N = inside_NT @ self.update_ms_T + SORT_MS_PER_MILLION * million_N * np.log2(2 + million_N)
        # One table's longest bags are a tail of its stage that no parallel work hides.
        tail_N2 = 0.05 * np.stack(
            [(inside_NT * ms_T).max(axis=1) for ms_T in (self.read_ms_T, self.update_ms_T)], axis=1
        )
        launch_N = LAUNCH_MS + TABLE_MS * count_N
        both = np.stack([forward_N, backward_N], axis=1) * idle_N[:, None] + launch_N[:, None] + tail_N2
        both[count_N == 0] = 0.0
        return both

    def exchange_ms(self, dims_NW: np.ndarray) -> np.ndarray:
        """Returns [N, 2] ms of synchronous exchanges: all ranks wait for the one with most to send or to receive."""
        mb = 4e-6 * self.batch_size / self.devices
        sent_N = dims_NW.max(axis=1) * mb * (self.devices - 1)
        received_N = (dims_NW.sum(axis=1) - dims_NW.min(axis=1)) * mb
        ms_N = self.latency_ms + self.sent_ms * sent_N + self.received_ms * received_N
        return np.stack([ms_N, 1.1 * ms_N], axis=1)

    def stages_ms(self, rank_T: np.ndarray) -> np.ndarray:
        """Returns [W, 4] exact ms of every rank's stages, in the order of PLANNED_STAGES."""
        inside_WT = rank_T == np.arange(self.devices)[:, None]
        forward_W, backward_W = self.compute_ms(inside_WT).T
        exchange_2 = self.exchange_ms((inside_WT @ self.dim_T)[None])[0]
        both_W2 = np.tile(exchange_2, (self.devices, 1))
        return np.column_stack([forward_W, both_W2, backward_W])

    def step_ms(self, rank_T: np.ndarray) -> float:
        return float(self.stages_ms(rank_T).max(axis=0).sum())

    # -- split tables ----------------------------------------------------------------------------------------------

    def of(self, plan: ShardingPlan) -> CostOracle:
        """Returns the same machine for the shards of `plan`."""
        if not plan.split_tables:
            return self
        names = tuple(plan.ordered([table.name for table in self.tables]).rank_of)
        if names not in self._of_shards:
            stats_of = {table.name: stat for table, stat in zip(self.tables, self.stats, strict=True)}
            shards = shard_tables(self.tables, plan)
            stats = [stats_of[shard.shard.table] for shard in shards]
            made = type(self)(shards, stats, self.batch_size, self.devices, self.seed, self.noise)
            self._of_shards[names] = made
        return self._of_shards[names]

    def plan_ms(self, plan: ShardingPlan) -> float:
        """Returns the plan's exact cost, with split tables or without."""
        of = self.of(plan)
        return of.step_ms(of.ranks_of(plan))

    # -- measurements --------------------------------------------------------------------------------------------------

    def ranks_of(self, plan: ShardingPlan) -> np.ndarray:
        return np.array([plan.rank_of[table.name] for table in self.tables])

    def profile(self, plan: ShardingPlan) -> StepProfile:
        of = self.of(plan)
        ranks = tuple(RankCost(*row) for row in self.measured(of.stages_ms(of.ranks_of(plan))).tolist())
        return StepProfile(plan, self.tables, self.stats, self.batch_size, ranks, "simulated", self.noise_iqr)

    def measure_shards(self, shards: Sequence[Sequence[Shard]]) -> list[ShardTime]:
        """Measures shards; a measurement's noise depends on the shard alone, not on the order."""
        ms_N2 = np.array([self._shard_ms(shard) for shard in shards])
        for number, shard in enumerate(shards):
            name = " ".join(shard)
            self._measured_before[name] += 1
            key = [self.seed, 3, zlib.crc32(name.encode()), self._measured_before[name]]
            ms_N2[number] = self.noisy(ms_N2[number], np.random.default_rng(key))
        return [ShardTime(forward, backward, self.noise_iqr, 1) for forward, backward in ms_N2.tolist()]

    def _shard_ms(self, names: Sequence[Shard]) -> np.ndarray:
        """Returns [2] exact ms of tables and parts of tables."""
        parts = {name.table: name.columns for name in names}
        rank_of = {}
        for table in self.tables:
            first, last = parts.get(table.name) or (0, table.embedding_dim)
            cuts = sorted({0, first, last, table.embedding_dim})
            for start, stop in itertools.pairwise(cuts):
                part = table.part(start, stop)
                rank_of[part.name] = 0 if part.name in names else 1
        of = self.of(ShardingPlan(rank_of, 2))
        inside_T = np.array([table.name in names for table in of.tables])
        ms_2: np.ndarray = of.compute_ms(inside_T[None])[0]
        return ms_2

    # -- the near-optimum ----------------------------------------------------------------------------------------------

    def near_optimum(self, starts: Sequence[np.ndarray], kicks: int, seed: int = 0) -> tuple[float, np.ndarray]:
        """Returns the least cost found by descents from `starts` and perturbed copies of the best, and its ranks."""
        generator = np.random.default_rng(seed)
        best = min((self._descend(start) for start in starts), key=lambda found: found[0])
        for _ in range(kicks):
            rank_T = best[1].copy()
            moved = generator.choice(len(rank_T), size=min(int(generator.integers(2, 5)), len(rank_T)), replace=False)
            rank_T[moved] = generator.integers(self.devices, size=len(moved))
            best = min(best, self._descend(rank_T), key=lambda found: found[0])
        return best

    def _descend(self, rank_T: np.ndarray) -> tuple[float, np.ndarray]:
        """Makes the best move or swap as long as one helps."""
        rank_T, now_ms = rank_T.copy(), self.step_ms(rank_T)
        while True:
            candidates_NT = self._neighbours(rank_T)
            step_N = self._steps_ms(rank_T, candidates_NT)
            best = int(step_N.argmin())
            if step_N[best] >= now_ms * (1 - 1e-9):
                return now_ms, rank_T
            rank_T, now_ms = candidates_NT[best], float(step_N[best])

    def _neighbours(self, rank_T: np.ndarray) -> np.ndarray:
        """Returns [N, T]: every move and swap of a table on a rank that is slowest in some stage or has most dims."""
        stages_W4 = self.stages_ms(rank_T)
        dims_W = np.bincount(rank_T, weights=self.dim_T, minlength=self.devices)
        slow = {int(stages_W4[:, 0].argmax()), int(stages_W4[:, 3].argmax()), int(dims_W.argmax())}
        outs = np.flatnonzero(np.isin(rank_T, list(slow)))
        found = []
        for table in outs:
            for rank in np.flatnonzero(np.arange(self.devices) != rank_T[table]):
                found.append(rank_T.copy())
                found[-1][table] = rank
            for other in np.flatnonzero(rank_T != rank_T[table]):
                found.append(rank_T.copy())
                found[-1][[table, other]] = rank_T[[other, table]]
        return np.array(found)

    def _steps_ms(self, rank_T: np.ndarray, candidates_NT: np.ndarray) -> np.ndarray:
        """Returns [N] exact steps. Only the ranks that differ from `rank_T` are computed again."""
        stages_W4 = self.stages_ms(rank_T)
        compute_NW2 = np.tile(stages_W4[:, [0, 3]], (len(candidates_NT), 1, 1))
        differ_NT = candidates_NT != rank_T
        touched_NW = np.zeros((len(candidates_NT), self.devices), dtype=bool)
        number_N, table_N = np.nonzero(differ_NT)
        touched_NW[number_N, candidates_NT[number_N, table_N]] = True
        touched_NW[number_N, rank_T[table_N]] = True
        number, rank = np.nonzero(touched_NW)
        compute_NW2[number, rank] = self.compute_ms(candidates_NT[number] == rank[:, None])
        dims_NW = np.stack([(candidates_NT == w) @ self.dim_T for w in range(self.devices)], axis=1)
        steps: np.ndarray = compute_NW2.max(axis=1).sum(axis=1) + self.exchange_ms(dims_NW).sum(axis=1)
        return steps
