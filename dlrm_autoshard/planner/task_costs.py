"""The cost model seen from one task: cheap predictions for any sets of its units on any of its ranks.

    costs = TaskCosts.of(task, cost_model, comms_law, rank_speed)
    costs.rank_ms(rank_U)                        # [W, 4] stages of every rank under a placement
    costs.step_ms(rank_U)                        # sum over stages of the slowest rank
    costs.stage_ms(sums_NK, ranks_N)             # the same for any device summaries: what search and rollouts call

Everything a device's cost depends on adds up over its units, so a candidate (one unit more here, one less there) is a
vector addition and one small network away; thousands are evaluated in one go.

Axes: U units, W ranks, N candidates, K summary columns, 4 stages in the order of PLANNED_STAGES.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dlrm_autoshard.costs import PLANNED_STAGES, RankCost
from dlrm_autoshard.planner.comms_law import CommsLaw
from dlrm_autoshard.planner.cost_model import CostModel
from dlrm_autoshard.planner.rank_speed import RankSpeed
from dlrm_autoshard.planner.task import PlacementTask

CHUNK = 65_536


@dataclass(frozen=True)
class TaskCosts:
    summary_UK: np.ndarray
    factor_W2: np.ndarray
    total_dims: float
    batch_size: int
    world_size: int
    model: CostModel
    law: CommsLaw

    @staticmethod
    def of(task: PlacementTask, model: CostModel, law: CommsLaw, speed: RankSpeed) -> TaskCosts:
        summary_TK = model.summaries(task.tables, task.stats, task.batch_size)
        return TaskCosts(
            summary_UK=task.units.sum_over_tables(summary_TK),
            factor_W2=speed.factors_W2(task.world_size, task.topology.speed),
            total_dims=float(sum(table.embedding_dim for table in task.tables)),
            batch_size=task.batch_size,
            world_size=task.world_size,
            model=model,
            law=law,
        )

    @torch.no_grad()
    def stage_ms(self, sums_NK: np.ndarray, ranks_N: np.ndarray) -> np.ndarray:
        """[N, 4] stages of ranks `ranks_N` that own the units summed in `sums_NK`."""
        if len(sums_NK) > CHUNK:
            return np.concatenate(
                [self.stage_ms(sums_NK[i : i + CHUNK], ranks_N[i : i + CHUNK]) for i in range(0, len(sums_NK), CHUNK)]
            )
        compute_N2 = self.model.device_ms(torch.from_numpy(sums_NK)).numpy() * self.factor_W2[ranks_N]
        comms_N2 = self.law.ms(sums_NK[:, 1].astype(np.float64), self.total_dims, self.batch_size, self.world_size)
        return np.stack([compute_N2[:, 0], comms_N2[:, 0], comms_N2[:, 1], compute_N2[:, 1]], axis=1)

    def sums(self, rank_U: np.ndarray) -> np.ndarray:
        """[W, K] summary of every rank; units with rank -1 are not placed yet."""
        placed = rank_U >= 0
        sums = np.zeros((self.world_size, self.summary_UK.shape[1]), dtype=np.float32)
        np.add.at(sums, rank_U[placed], self.summary_UK[placed])
        return sums

    def rank_ms(self, rank_U: np.ndarray) -> np.ndarray:
        return self.stage_ms(self.sums(rank_U), np.arange(self.world_size))

    def step_ms(self, rank_U: np.ndarray) -> float:
        return float(self.rank_ms(rank_U).max(axis=0).sum())

    def alone_ms(self) -> np.ndarray:
        """[U] cost of each unit alone on a usual rank, all stages."""
        return self.model_alone().sum(axis=1)

    def model_alone(self) -> np.ndarray:
        ranks_U = np.full(len(self.summary_UK), int(self.factor_W2.sum(axis=1).argmin()))
        return self.stage_ms(self.summary_UK, ranks_U)

    def rank_costs(self, rank_U: np.ndarray) -> tuple[RankCost, ...]:
        return tuple(
            RankCost(**{f"{stage}_ms": float(ms) for stage, ms in zip(PLANNED_STAGES, row, strict=True)})
            for row in self.rank_ms(rank_U)
        )
