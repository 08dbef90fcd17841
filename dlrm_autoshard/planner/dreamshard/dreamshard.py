"""DreamShard: a cost network learned from measured placements, a policy learned on the MDP that it estimates.

    trainer.train(tasks, costs_of, measure, fit_costs)      # algorithm 1
    rank_U = trainer.place(mdp, samples=64)[0]       # likeliest devices and samples; the least predicted cost wins

Reads down in the paper's order (algorithm 1): collect, cost network, policy. The reference's budget is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from dlrm_autoshard.planner.costs.mlp import Adam
from dlrm_autoshard.planner.dreamshard.masked import gumbel_noise
from dlrm_autoshard.planner.dreamshard.mdp import EstimatedMDP, Rollout
from dlrm_autoshard.planner.dreamshard.policy import DevicePolicy
from dlrm_autoshard.planner.dreamshard.settings import DreamShardSettings
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts


class DreamShard:
    """Trains a policy on the cost network's estimates, episode by episode."""

    def __init__(self, policy: DevicePolicy, settings: DreamShardSettings, seed: int = 0) -> None:
        self.policy = policy
        self.settings = settings
        self.generator = np.random.default_rng(seed)
        self.adam = Adam(*policy.nets.values())
        self.learning_rate = settings.learning_rate

    def train(
        self,
        tasks: Sequence[PlacementTask],
        costs_of: Callable[[PlacementTask], TaskCosts],
        measure: Callable[[Rollout], None],
        fit_costs: Callable[[], None],
    ) -> None:
        """Runs algorithm 1. `measure` measures and keeps placements; `fit_costs` fits the cost model to those kept."""

        def mdp_of(number: int) -> EstimatedMDP:
            return EstimatedMDP(tasks[number], costs_of(tasks[number]))

        for iteration in range(self.settings.iterations):
            now = cache(mdp_of)
            picks = np.bincount(self.generator.integers(len(tasks), size=self.settings.placements))
            for number in np.flatnonzero(picks).tolist():
                measure(self.sampled(now(number), int(picks[number])))
            fit_costs()
            now = cache(mdp_of)  # under the costs that were learned
            self.learning_rate = self.settings.learning_rate * (1 - iteration / self.settings.iterations)
            for number in self.generator.integers(len(tasks), size=self.settings.policy_updates).tolist():
                self.reinforce(self.sampled(now(number), self.settings.episodes))

    def reinforce(self, rollout: Rollout) -> None:
        """Makes one REINFORCE update; the advantage is the reward standardised over the episodes."""
        reward_E = -rollout.cost_E * (1 + rollout.overflow_E)  # an overflowing placement counts double
        advantage_E = (reward_E - reward_E.mean()) / (reward_E.std(ddof=1) + 1e-9)
        self.policy.reinforce(rollout, advantage_E, self.settings.entropy_weight)
        self.adam.step(self.learning_rate)

    def sampled(self, mdp: EstimatedMDP, episodes: int) -> Rollout:
        shape = (episodes, len(mdp.order), mdp.task.world_size)
        return mdp.rollout(self.policy, gumbel_noise(shape, self.generator))

    def place(self, mdp: EstimatedMDP, samples: int) -> list[np.ndarray]:
        """Returns legal placements, the likeliest and samples, by predicted cost; empty if all overflowed."""
        rollouts = [mdp.rollout(self.policy, for_loss=False)]
        if samples:
            shape = (samples, len(mdp.order), mdp.task.world_size)
            rollouts.append(mdp.rollout(self.policy, gumbel_noise(shape, self.generator), for_loss=False))
        found = [
            (float(cost), rank_U)
            for rollout in rollouts
            for rank_U, cost, overflow in zip(rollout.rank_EU, rollout.cost_E, rollout.overflow_E, strict=True)
            if not overflow
        ]
        return [rank_U for _, rank_U in sorted(found, key=lambda pair: pair[0])]
