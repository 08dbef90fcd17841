"""What plans are expected to cost by all that was measured, and how sure that is.

found = estimates(task, costs, corrections, [rank_U, other_U])
found.step_ms[1], found.gain(0, 1)       # Gain(mean=0.031, std=0.012): what the second saves over the first
found.worth_knowing                      # 0.009: part of the step that choosing saves, once their costs are known
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.costs import COMPUTE, EXCHANGE
from dlrm_autoshard.planner.corrections import Corrections
from dlrm_autoshard.planner.cost_model import COST
from dlrm_autoshard.planner.result import Gain
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts

DRAWS = 512
MOST_RANKS = 32
"""Of each plan and stage, the dearest: others are hardly ever the slowest."""


@dataclass(frozen=True)
class Estimates:
    """step_ms_DP: [D, P] what each of P plans may cost, in D draws of what the measurements leave open.

    A stage takes as long as its slowest rank, so what is not known of the ranks makes a step longer, on average, than
    the slowest rank's expected time. Of a plan that has been measured little is unknown; one that was only searched
    for must save that much more.
    """

    step_ms_DP: np.ndarray

    @property
    def step_ms(self) -> np.ndarray:
        """[P], expected."""
        mean: np.ndarray = self.step_ms_DP.mean(axis=0)
        return mean

    def gain(self, current: int, candidate: int) -> Gain:
        """In each draw both err by what they have in common."""
        if not self.step_ms_DP[:, current].all():
            return Gain(0.0, 0.0)
        saved_D = 1 - self.step_ms_DP[:, candidate] / self.step_ms_DP[:, current]
        return Gain(float(saved_D.mean()), float(saved_D.std()))

    def of(self, plans: Sequence[int]) -> Estimates:
        """Some of the plans."""
        return Estimates(self.step_ms_DP[:, plans])

    @property
    def worth_knowing(self) -> float:
        """Part of the step that choosing between the plans would save, on average, if their costs were known."""
        expected = float(self.step_ms.min())
        return 1 - float(self.step_ms_DP.min(axis=1).mean()) / expected if expected else 0.0


def expected_ms(
    task: PlacementTask, costs: TaskCosts, corrections: Corrections, rank_U: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[W, 4] that each rank takes, with what is known of sets of tables like its own beside that of single tables; and
    [2, W, T] each table's share of its rank's computation."""
    cost_T2 = costs.summary_TK[:, COST].astype(np.float64)
    inside_WT = rank_U[task.units.unit_of_T] == np.arange(task.world_size)[:, None]
    sums_W2 = inside_WT @ cost_T2 + costs.launch_S
    share_2WT = inside_WT * cost_T2.T[:, None, :] / sums_W2.T[:, :, None]
    ms_W4 = costs.rank_ms(rank_U)
    ms_W4[:, COMPUTE] *= corrections.together_factors_W2(share_2WT, ms_W4[:, COMPUTE], task.tables)
    return ms_W4, share_2WT


def estimates(
    task: PlacementTask,
    costs: TaskCosts,
    corrections: Corrections,
    placements: Sequence[np.ndarray],
    measuring: Sequence[int] | None = None,
) -> Estimates:
    """Of placements of the task's units. measuring: tables (numbers of the task's); what is drawn then is what the
    expected costs may be once these have been measured alone, and nothing else is known."""
    most = min(task.world_size, MOST_RANKS)
    shares, ms, ranks, exchanges = [], [], [], []
    for rank_U in placements:
        ms_W4, share_2WT = expected_ms(task, costs, corrections, rank_U)
        exchanges.append(ms_W4[:, EXCHANGE].max(axis=0).sum())
        for stage, ms_W in enumerate(ms_W4[:, COMPUTE].T):
            dearest = np.argsort(-ms_W)[:most]
            ranks.append(dearest)
            ms.append(ms_W[dearest])
            shares.append(share_2WT[stage, dearest])
    stage_M = np.tile(np.repeat([0, 1], most), len(placements))
    share_MT, ms_M, rank_M = np.concatenate(shares), np.concatenate(ms), np.concatenate(ranks)
    if measuring is None:
        covariance = corrections.covariance(share_MT, ms_M, stage_M, rank_M, task.tables)
    elif not measuring:
        covariance = np.zeros((len(ms_M), len(ms_M)))
    else:
        alone_KT = np.eye(len(task.tables))[list(measuring)]
        alone_K2 = costs.device_ms(costs.summary_TK[list(measuring)])
        covariance = corrections.told(share_MT, ms_M, stage_M, rank_M, task.tables, alone_KT, alone_K2)
    values, vectors = np.linalg.eigh(covariance)
    drawn_DM = np.random.default_rng(0).standard_normal((DRAWS, len(values)))
    errors_DM = drawn_DM @ (vectors * np.sqrt(np.maximum(values, 0.0))).T - covariance.diagonal() / 2  # 1 on average
    computed_DP = (ms_M * np.exp(errors_DM)).reshape(DRAWS, len(placements), 2, most).max(axis=3).sum(2)
    return Estimates(computed_DP + np.array(exchanges))
