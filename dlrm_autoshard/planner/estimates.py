"""Estimates plans' costs from all measurements, with their uncertainty.

found = estimates(task, costs, corrections, [rank_U, other_U])
found.step_ms[1], found.gain(0, 1)       # Gain(mean=0.031, std=0.012): saving of the second over the first
found.worth_knowing()                    # 0.009: fraction of the step that knowing the costs would save
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dlrm_autoshard.costs import COMPUTE, EXCHANGE
from dlrm_autoshard.planner.corrections.corrections import Corrections
from dlrm_autoshard.planner.corrections.gaussian import square_root
from dlrm_autoshard.planner.corrections.stages import Stages
from dlrm_autoshard.planner.costs.cost_model import COST
from dlrm_autoshard.planner.costs.exchange_model import MEASURED
from dlrm_autoshard.planner.costs.loads import log_loads
from dlrm_autoshard.planner.result import Gain
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts

DRAWS = 512
ROUNDS = 2
"""How often finalists are measured, interleaved."""
MOST_RANKS = 32
"""Most ranks to draw per plan and stage, the costliest ones; others are rarely the slowest."""


@dataclass(frozen=True)
class Estimates:
    """Posterior draws of plans' step costs. step_ms_DP: ms [D, P] of P plans in D draws.

    A stage takes as long as its slowest rank, so uncertainty about ranks makes a step longer on average than the
    slowest rank's expected time. Measured plans have little uncertainty; a plan that was only searched must save that
    much more.
    """

    step_ms_DP: np.ndarray

    @property
    def step_ms(self) -> np.ndarray:
        """Expected ms [P]."""
        mean: np.ndarray = self.step_ms_DP.mean(axis=0)
        return mean

    def gain(self, current: int, candidate: int) -> Gain:
        saved_D = self.saved_DP(current)[:, candidate]
        return Gain(float(saved_D.mean()), float(saved_D.std()))

    def saved_DP(self, current: int) -> np.ndarray:
        """Returns savings [D, P] as fractions of the current plan's step; common errors cancel within a draw."""
        current_D1 = self.step_ms_DP[:, [current]]
        return 1 - self.step_ms_DP / current_D1 if current_D1.all() else np.zeros_like(self.step_ms_DP)

    def of(self, plans: Sequence[int]) -> Estimates:
        """Returns the estimates of some of the plans."""
        return Estimates(self.step_ms_DP[:, plans])

    def worth_knowing(self, kept: int | None = None) -> float:
        """Returns the value of information: the fraction of a step that choosing would save on average if costs were
        known.

        kept: the plan taken without knowing them; default: the one with the lowest expected cost."""
        expected = float(self.step_ms.min() if kept is None else self.step_ms[kept])
        return 1 - float(self.step_ms_DP.min(axis=1).mean()) / expected if expected else 0.0


def expected_ms(
    task: PlacementTask, costs: TaskCosts, corrections: Corrections, rank_U: np.ndarray
) -> tuple[np.ndarray, Stages]:
    """Returns ms [W, 4] of each rank, corrected by measurements of sets like its tables; and the ranks' forward, then
    backward computations."""
    inside_WT = (rank_U[task.units.unit_of_T] == np.arange(task.world_size)[:, None]).astype(np.float64)
    ms_W4 = costs.rank_ms(rank_U)
    stages = _stages(costs, inside_WT, ms_W4[:, COMPUTE], np.arange(task.world_size))
    ms_W4[:, COMPUTE] *= corrections.together_factors_W2(stages, task.tables)
    return ms_W4, replace(stages, ms_M=ms_W4[:, COMPUTE].T.ravel())


def _stages(costs: TaskCosts, inside_NT: np.ndarray, ms_N2: np.ndarray, rank_N: np.ndarray) -> Stages:
    """Describes forward, then backward computations of sets of the task's tables."""
    sums_NK = inside_NT @ costs.summary_TK
    share_2NT = inside_NT * costs.summary_TK[:, COST].T[:, None, :] / (sums_NK[:, COST] + costs.launch_S).T[:, :, None]
    return Stages(
        ms_N2.T.ravel(),
        np.repeat([0, 1], len(rank_N)),
        np.tile(rank_N, 2),
        np.concatenate(list(share_2NT)),
        np.tile(log_loads(sums_NK), (2, 1)),
    )


def _alone(task: PlacementTask, costs: TaskCosts, tables: Sequence[int]) -> Stages:
    """Describes forward, then backward computations of these tables, each alone on any rank."""
    own = costs.summary_TK[list(tables)]
    return _stages(costs, np.eye(len(task.tables))[list(tables)], costs.device_ms(own), np.full(len(own), -1))


def _drawn(covariance: np.ndarray, draws: int) -> np.ndarray:
    """Draws logarithms [D, M] of factors with mean 1; in antithetic pairs, so that few draws have accurate means."""
    half_DM = np.random.default_rng(0).standard_normal((draws // 2, len(covariance)))
    drawn_DM = np.concatenate([half_DM, -half_DM])
    errors_DM: np.ndarray = drawn_DM @ square_root(covariance).T - covariance.diagonal() / 2
    return errors_DM


def estimates(
    task: PlacementTask,
    costs: TaskCosts,
    corrections: Corrections,
    placements: Sequence[np.ndarray],
    *,
    alone: Sequence[int] | None = None,
    placed: Sequence[np.ndarray] = (),
) -> Estimates:
    """Returns estimates of placements of the task's units.

    alone, placed: draw instead what the expected costs may become once these tables (by number) or these placements
    have been measured."""
    most = min(task.world_size, MOST_RANKS)
    asked, exchanged = [], []
    for rank_U in placements:
        ms_W4, ranks = expected_ms(task, costs, corrections, rank_U)
        exchanged.append(ms_W4[:, EXCHANGE].max(axis=0).sum())
        costliest_2M = np.argsort(-ranks.ms_M.reshape(2, -1), axis=1)[:, :most]
        asked.append(ranks.some(np.add(costliest_2M, [[0], [task.world_size]]).ravel()))
    every, exchange = asked[0].and_also(*asked[1:]), costs.exchange_spread
    stages, which_M = every.distinct()
    if placed:
        measured, *more = (expected_ms(task, costs, corrections, rank_U)[1] for rank_U in placed)
        covariance = corrections.told(stages, measured.and_also(*more).distinct()[0], task.tables, ROUNDS)
        exchange = max(0.0, exchange**2 - MEASURED**2) ** 0.5
    elif alone is not None:
        covariance = corrections.told(stages, _alone(task, costs, alone), task.tables)
        exchange = 0.0
    else:
        covariance = corrections.covariance(stages, task.tables)
    covariance = np.pad(covariance, (0, 1))
    covariance[-1, -1] = exchange**2
    factors_DM = np.exp(_drawn(covariance, DRAWS))
    computed_DM = every.ms_M * factors_DM[:, which_M]
    computed_DP = computed_DM.reshape(DRAWS, len(placements), 2, most).max(axis=3).sum(axis=2)
    return Estimates(computed_DP + np.array(exchanged) * factors_DM[:, [-1]])
