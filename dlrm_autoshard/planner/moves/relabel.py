"""Which of several equal ranks is called what decides nothing but how much has to move.

rank_U = relabelled(task, costs, rank_U, current)      # as cheap as before, as much as possible stays where it is
"""

from __future__ import annotations

import numpy as np

from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.search.moving import held_bytes
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts
from dlrm_autoshard.planner.units import Room

AS_CHEAP = 1e-3
"""Part of a step by which two placements count as equally cheap: less than any measurement tells."""


def relabelled(task: PlacementTask, costs: TaskCosts, rank_U: np.ndarray, current: ShardingPlan) -> np.ndarray:
    """Exchanges the names of pairs of ranks, each time the pair that saves most bytes, while the plan stays legal
    and as cheap. current: where everything is now, however it is split."""
    units, most_ms = task.units, costs.step_ms(rank_U) * (1 + AS_CHEAP)
    refused: set[tuple[int, int]] = set()
    stays_WW = np.zeros((task.world_size, task.world_size))
    np.add.at(stays_WW, rank_U[units.unit_of_T], held_bytes(task, current))
    while True:
        own_W = np.diag(stays_WW)
        saved_WW = np.triu(stays_WW + stays_WW.T - own_W - own_W[:, None], k=1)
        for one, other in refused:
            saved_WW[one, other] = 0.0
        one, other = (int(rank) for rank in np.unravel_index(saved_WW.argmax(), saved_WW.shape))
        if saved_WW[one, other] <= 0:
            return rank_U
        name_W = np.arange(task.world_size)
        name_W[[one, other]] = other, one
        swapped_U = name_W[rank_U]
        # Groups that are kept apart stay so under any names.
        legal = units.allowed_UW[np.arange(len(units)), swapped_U].all() and (Room(units, swapped_U).free_W >= 0).all()
        if legal and costs.step_ms(swapped_U) <= most_ms:
            rank_U = swapped_U
            stays_WW[[one, other]] = stays_WW[[other, one]]
        else:
            refused.add((one, other))
