"""A planner that an engineer would write in an afternoon: tables measured alone, four features, local search.

rank_T = plain_rival(task, oracle, plans=12)
"""

from __future__ import annotations

import numpy as np

from dlrm_autoshard.benchmarks.cost_oracle import CostOracle
from dlrm_autoshard.costs import stages_W4
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.search.greedy import KEYS, greedy
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import PASSES, calibration_shards

# Axes: N sets of tables, T tables, W devices, F features.


class Fitted(CostOracle):
    """Costs fitted to measurements, on which the oracle's local search runs."""

    def __init__(self, oracle: CostOracle, task: PlacementTask, alone_T2: np.ndarray) -> None:
        super().__init__(oracle.tables, oracle.stats, oracle.batch_size, oracle.devices)
        self._alone_T2, self._task = alone_T2, task
        self._sets: list[tuple[np.ndarray, np.ndarray]] = []  # inside_T, ms_2
        self._exchanges: list[tuple[np.ndarray, np.ndarray]] = []  # dims_W, ms_2
        self._weights_F2, self._price_2 = np.zeros((4, 2)), np.zeros(2)

    def _features(self, inside_NT: np.ndarray) -> np.ndarray:
        """[N, 4]"""
        logs = [inside_NT.sum(axis=1), inside_NT @ self._alone_T2.sum(axis=1), inside_NT @ self.unique_bytes_T]
        return np.stack([np.ones(len(inside_NT)), *(np.log(np.maximum(log, 1e-3)) for log in logs)], axis=1)

    def compute_ms(self, inside_NT: np.ndarray) -> np.ndarray:
        ms_N2: np.ndarray = inside_NT @ self._alone_T2 * np.exp(self._features(inside_NT) @ self._weights_F2)
        return ms_N2

    def exchange_ms(self, dims_NW: np.ndarray) -> np.ndarray:
        hosts = self._task.topology.ranks_by_host
        by_host = np.max([dims_NW[:, sorted(ranks)].sum(axis=1) for ranks in hosts], axis=0)
        widest_N = dims_NW.max(axis=1) if len(hosts) == 1 else by_host
        return widest_N[:, None] * self._price_2

    def learn(self, inside_T: np.ndarray, ms_2: np.ndarray) -> None:
        if inside_T.any():
            self._sets.append((inside_T.astype(np.float64), ms_2))

    def learn_plan(self, rank_T: np.ndarray, stages: np.ndarray) -> None:
        for rank in range(self.devices):
            self.learn(rank_T == rank, stages[rank, [0, 3]])
        dims_W = np.bincount(rank_T, weights=self.dim_T, minlength=self.devices)
        self._exchanges.append((dims_W, stages[:, 1:3].max(axis=0)))

    def fit(self) -> None:
        inside_NT, ms_N2 = (np.array(part) for part in zip(*self._sets, strict=True))
        features_NF = self._features(inside_NT)
        off_N2 = np.log(ms_N2 / (inside_NT @ self._alone_T2))
        ridge = 1e-2 * np.eye(4)
        self._weights_F2 = np.linalg.solve(features_NF.T @ features_NF + ridge, features_NF.T @ off_N2)
        if self._exchanges:
            dims_NW, exchange_N2 = (np.array(part) for part in zip(*self._exchanges, strict=True))
            self._price_2 = np.ones(2)
            self._price_2 = (exchange_N2 / self.exchange_ms(dims_NW)).mean(axis=0)


def plain_rival(task: PlacementTask, oracle: CostOracle, plans: int) -> np.ndarray:
    """Returns the placement that measured best of so many, each the best by all measurements before it.

    It is given the same sets of tables as a start of our own planner measures.
    """
    alone, sets = calibration_shards(task, seed=0)
    alone = [[name] for name in task.names]
    times = [[(t.fwd_compute_ms, t.bwd_compute_ms) for t in oracle.measure_shards(alone)] for _ in range(PASSES)]
    model = Fitted(oracle, task, np.median(times, axis=0))
    for shard, time in zip(sets, oracle.measure_shards(sets), strict=True):
        inside_T = np.array([name in set(shard) for name in task.names])
        model.learn(inside_T, np.array([time.fwd_compute_ms, time.bwd_compute_ms]))
    starts, measured = [greedy(task, key) for key in KEYS], dict[bytes, tuple[float, np.ndarray]]()
    for number in range(plans):
        model.fit()
        _, rank_T = model.near_optimum(starts, kicks=5, seed=number)
        if rank_T.tobytes() in measured:
            break
        profile = oracle.profile(ShardingPlan(dict(zip(task.names, rank_T.tolist(), strict=True)), oracle.devices))
        stages = stages_W4(profile.ranks)
        measured[rank_T.tobytes()] = float(stages.max(axis=0).sum()), rank_T
        model.learn_plan(rank_T, stages)
        starts = [rank_T, *starts[:2]]
    return min(measured.values(), key=lambda found: found[0])[1]
