"""What plans are expected to cost by all that was measured, and how sure that is.

found = estimates(task, costs, corrections, [rank_U, other_U])
found.step_ms[1], found.gain(0, 1)       # Gain(mean=0.031, std=0.012): what the second saves over the first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.costs import COMPUTE
from dlrm_autoshard.planner.corrections import Corrections
from dlrm_autoshard.planner.cost_model import COST
from dlrm_autoshard.planner.result import Gain
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts


@dataclass(frozen=True)
class Estimates:
    """Of P plans: step_ms [P]; slowest_P2: ms of the slowest rank in forward and backward computation, whose logarithms
    have covariance [2P, 2P]."""

    step_ms: np.ndarray
    slowest_P2: np.ndarray
    covariance: np.ndarray

    def gain(self, current: int, candidate: int) -> Gain:
        """To first order in the errors, which current and candidate have largely in common."""
        if self.step_ms[current] <= 0:
            return Gain(0.0, 0.0)
        ratio = float(self.step_ms[candidate] / self.step_ms[current])
        weights = np.zeros((len(self.step_ms), 2))
        weights[candidate] += self.slowest_P2[candidate] / self.step_ms[current]
        weights[current] -= ratio * self.slowest_P2[current] / self.step_ms[current]
        variance = weights.ravel() @ self.covariance @ weights.ravel()
        return Gain(1 - ratio, float(np.sqrt(max(variance, 0.0))))


def estimates(
    task: PlacementTask, costs: TaskCosts, corrections: Corrections, placements: Sequence[np.ndarray]
) -> Estimates:
    """Of placements of the task's units."""
    world_size, count = task.world_size, len(placements)
    cost_T2 = costs.summary_TK[:, COST].astype(np.float64)
    shares, steps, slowest, ranks = [], [], [], []
    for rank_U in placements:
        rank_T = rank_U[task.units.unit_of_T]
        inside_WT = rank_T == np.arange(world_size)[:, None]
        sums_W2 = inside_WT @ cost_T2 + costs.launch_S
        share_2WT = inside_WT * cost_T2.T[:, None, :] / sums_W2.T[:, :, None]
        ms_W4 = costs.rank_ms(rank_U)
        ms_W4[:, COMPUTE] *= corrections.together_factors_W2(share_2WT, task.tables)
        steps.append(ms_W4.max(axis=0).sum())
        slowest.append(ms_W4[:, COMPUTE].max(axis=0))
        rank_2 = ms_W4[:, COMPUTE].argmax(axis=0)
        ranks.append(rank_2)
        shares.append(share_2WT[[0, 1], rank_2])
    covariance = corrections.covariance(
        np.concatenate(shares), np.tile([0, 1], count), np.concatenate(ranks), task.tables
    )
    return Estimates(np.array(steps), np.array(slowest), covariance)
