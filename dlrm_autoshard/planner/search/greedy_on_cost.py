"""One pass over the units by predicted cost: what search starts from, and the plan where search would take too long.

    rank_U = greedy_on_cost(task, costs)

Axes: U units, W ranks, N candidates, K summary columns, 4 stages.
"""

from __future__ import annotations

import numpy as np

from dlrm_autoshard.planner.search.greedy import balance
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts
from dlrm_autoshard.planner.units import Room

MOST_RANKS = 8
"""Ranks whose fused cost is predicted for a unit: the likeliest by the sum of costs alone."""


class StageLoads:
    """Measures how loaded ranks are by one number that adds up over stages: each stage's ms over an even share of its
    work, to the eighth power, weighted by the share.

    A step is the sum over stages of the slowest rank, so a rank should be filled in all stages at once; the power makes
    the fullest stage count most (vector scheduling by a norm: Chekuri and Khanna 2004).
    """

    def __init__(self, alone_U4: np.ndarray, empty_4: np.ndarray, ranks: int) -> None:
        even_4 = (alone_U4 - empty_4).sum(axis=0) / ranks + empty_4
        self.share_4 = np.maximum(np.maximum(even_4, alone_U4.max(axis=0)), 1e-9)
        self.weight_4 = self.share_4 / self.share_4.sum()

    def __call__(self, ms: np.ndarray) -> np.ndarray:
        """Returns [...] of ms [..., 4]."""
        load = ms / self.share_4
        for _ in range(3):
            load *= load
        summed: np.ndarray = load @ self.weight_4
        return summed


def greedy_on_cost(task: PlacementTask, costs: TaskCosts) -> np.ndarray:
    """Returns ranks [U]: costliest unit first, each to the rank whose `StageLoads` rise least."""
    units, room, everywhere = task.units, Room(task.units), np.arange(task.world_size)
    sums_WK = np.zeros((task.world_size, costs.summary_UK.shape[1]), dtype=np.float32)
    ms_W4 = costs.stage_ms(sums_WK, everywhere)
    empty_4 = ms_W4.min(axis=0)
    alone_U4 = costs.stage_ms(costs.summary_UK, np.full(len(units), costs.fastest))
    loads = StageLoads(alone_U4, empty_4, len(task.topology.usable_ranks))
    load_W = loads(ms_W4)
    for unit in np.argsort(-alone_U4.sum(axis=1), kind="stable").tolist():
        legal = np.flatnonzero(room.legal_W(unit))
        if len(legal) == 0:
            return balance(task, alone_U4.sum(axis=1))
        if len(legal) > MOST_RANKS:
            rise = loads(ms_W4[legal] + (alone_U4[unit] - empty_4)) - load_W[legal]
            legal = legal[np.argpartition(rise, MOST_RANKS)[:MOST_RANKS]]
        after_N4 = costs.stage_ms(sums_WK[legal] + costs.summary_UK[unit], legal)
        after_N = loads(after_N4)
        best = int((after_N - load_W[legal]).argmin())
        rank = int(legal[best])
        room.place(unit, rank)
        sums_WK[rank] += costs.summary_UK[unit]
        ms_W4[rank], load_W[rank] = after_N4[best], after_N[best]
    return room.rank_U
