"""What plans cost, all things considered: predictions corrected by measurements, as far as these can be trusted.

    evidence = Evidence(task, costs)
    evidence.add(profiles)                  # measured plans
    evidence.costs                          # predictions for any plan, corrected: what to search with
    evidence.step_ms(rank_U)                # a measured plan's cost: between what was predicted and what was measured

The smallest of several noisy figures is the luckiest one, so a plan is not taken for what it measured. A shard's
computation, relative to its prediction, is assumed to be off by

    sum over its units of (unit's share of the cost) x (unit's error) + (the shard's own error) + (measurement noise)

three independent normal errors: of spread TABLE_ERROR (a table that the model gets wrong is wrong in every plan),
SHARD_ERROR (what fusing just these tables does) and the noise that the measurement reports. Given what was measured,
the best estimate of each is a small linear system (Gaussian conditioning). A measurement without noise counts in full;
one that is as noisy as the prediction is wrong counts half.

Axes: U units, S measured shards, W ranks, 2 stages of computation (forward, backward) and 2 of exchange.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from dlrm_autoshard.costs import EXCHANGE, PLANNED_STAGES, StepProfile
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts

TABLE_ERROR = 0.12
"""Spread of a table's relative error in every plan: what held-out shards of the shipped costs show."""
SHARD_ERROR = 0.03
"""Spread of what is wrong about one set of tables beside its tables."""
EXCHANGE_ERROR = 0.1
"""Spread of an exchange's relative error."""

EXACT = 1e-4
"""A measurement without noise may still be off by this."""
MOST_SHARDS = 2000
"""With more of them (hundreds of ranks) measurements are taken as they are: the system would no longer be small."""
IQR_OF_NORMAL = 1.35
"""A profile's noise is an interquartile range: so many standard deviations."""


class Evidence:
    def __init__(self, task: PlacementTask, costs: TaskCosts) -> None:
        self.task, self.costs = task, costs
        self._believed = costs
        self._profiles: list[StepProfile] = []
        self._stages_W4: dict[str, np.ndarray] = {}  # measured plan -> estimate of every rank's stages

    def add(self, profiles: Sequence[StepProfile], believed: TaskCosts | None = None) -> None:
        """Takes in measured plans. believed: predictions that already know the ranks' speeds."""
        self._profiles += profiles
        self._believed = believed or self._believed
        self._learn()

    def step_ms(self, rank_U: np.ndarray) -> float:
        """The best estimate of a plan's step: sum over stages of the slowest rank."""
        plan = self.task.plan_from(rank_U)
        if plan.fingerprint in self._stages_W4:
            return float(self._stages_W4[plan.fingerprint].max(axis=0).sum())
        return self.costs.step_ms(rank_U)

    def _learn(self) -> None:
        believed, world_size = self._believed, self.task.world_size
        placements = [self.task.ranks_from(profile.plan) for profile in self._profiles]
        predicted_PW4 = np.stack([believed.rank_ms(rank_U) for rank_U in placements])
        measured_PW4 = np.array(
            [[[rank.stage(stage) for stage in PLANNED_STAGES] for rank in p.ranks] for p in self._profiles]
        )
        noise_P = np.array([profile.noise / IQR_OF_NORMAL for profile in self._profiles])
        corrected, estimate_PW4 = copy.copy(believed), measured_PW4.copy()
        if len(placements) * world_size <= MOST_SHARDS:
            corrected.summary_UK = believed.summary_UK.copy()
            owned_PWU = np.stack([rank_U == np.arange(world_size)[:, None] for rank_U in placements])
            for stage, column in ((0, 2), (3, 3)):
                used = (predicted_PW4[..., stage] > 0) & (measured_PW4[..., stage] > 0)
                shares_SU = owned_PWU[used] * believed.summary_UK[:, column].astype(np.float64)
                shares_SU /= shares_SU.sum(axis=1, keepdims=True) + float(believed.model.launch_S[column - 2])
                off_S = measured_PW4[used][:, stage] / predicted_PW4[used][:, stage] - 1
                noise_S = np.broadcast_to(noise_P[:, None], used.shape)[used]
                error_U, error_S = most_likely_errors(shares_SU, off_S, noise_S)
                estimate_PW4[used, stage] = predicted_PW4[used, stage] * (1 + error_S)
                corrected.summary_UK[:, column] *= 1 + error_U.clip(-0.5, 1.0).astype(np.float32)
            trust_P11 = (EXCHANGE_ERROR**2 / (EXCHANGE_ERROR**2 + noise_P**2))[:, None, None]
            exchange = (measured_PW4[..., EXCHANGE] - predicted_PW4[..., EXCHANGE]) * trust_P11
            estimate_PW4[..., EXCHANGE] = predicted_PW4[..., EXCHANGE] + exchange
            # What all exchanges are off by, those of plans that were not measured are off by too.
            before_2, after_2 = (
                predicted_PW4[..., EXCHANGE].sum(axis=(0, 1)),
                estimate_PW4[..., EXCHANGE].sum(axis=(0, 1)),
            )
            corrected.scale_exchange(np.divide(after_2, before_2, out=np.ones(2), where=before_2 > 0))
        self.costs = corrected
        self._stages_W4 = {p.plan.fingerprint: e for p, e in zip(self._profiles, estimate_PW4, strict=True)}


def most_likely_errors(shares_SU: np.ndarray, off_S: np.ndarray, noise_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([U] relative error of each unit, [S] of each shard, noise left out), given what the shards measured off by."""
    # The same tables measured twice, in two plans, have one error of their own.
    _, number_S = np.unique(shares_SU > 0, axis=0, return_inverse=True)
    same_SS = number_S.reshape(-1, 1) == number_S.reshape(1, -1)
    true_SS = TABLE_ERROR**2 * shares_SU @ shares_SU.T + SHARD_ERROR**2 * same_SS
    weights_S = np.linalg.solve(true_SS + np.diag(noise_S**2 + EXACT**2), off_S)
    return TABLE_ERROR**2 * shares_SU.T @ weights_S, true_SS @ weights_S
