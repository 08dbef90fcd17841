"""The policies that learn, by name: DreamShard's, the sequence policies, and DreamShard exactly as published.

    policies.place("dreamshard", task, costs)            # {"dreamshard": rank_U, "dreamshard sample": rank_U}

DreamShard's policy is the shipped one, or what `Planner.fit` made of it. Only the sequence policies, which serve
comparison, are trained at plan time.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from dlrm_autoshard.plan import PlanError
from dlrm_autoshard.planner.baselines.reference import ReferenceDreamShard
from dlrm_autoshard.planner.baselines.sequence import SequencePolicy, SequenceSettings, SequenceTrainer
from dlrm_autoshard.planner.dreamshard.dreamshard import DreamShard
from dlrm_autoshard.planner.dreamshard.mdp import EstimatedMDP
from dlrm_autoshard.planner.dreamshard.policy import DevicePolicy
from dlrm_autoshard.planner.dreamshard.settings import DreamShardSettings
from dlrm_autoshard.planner.search.greedy_on_cost import greedy_on_cost
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts

SMALL, MEDIUM = 2_000, 30_000
"""Units x ranks. Small: sequence policies that were not fitted are trained on the task itself, by predicted costs.
Larger than medium: the likeliest placement alone."""


class Policies:
    """Holds the networks of all learned algorithms, and makes placements by them."""

    def __init__(self, settings: DreamShardSettings, seed: int = 0, *, reference: bool = False) -> None:
        self.settings, self.seed = settings, seed
        self.reference = ReferenceDreamShard(seed, settings) if reference else None
        self.policy = DevicePolicy.shipped()
        self.sequences = {
            "autoshard": SequencePolicy(seed, enriched=True),
            "rnn": SequencePolicy(seed, enriched=False),
        }

    def place(
        self, name: str, task: PlacementTask, costs: TaskCosts, deadline: float | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the policy's placement and its next best sample. The planner's own policy stays as `fit` left it."""
        if name == "dreamshard" and self.reference is not None:
            if not self.reference.trained_iterations:
                raise PlanError(
                    "the reference DreamShard learns from measured placements only: call Planner.fit(tasks, measure), "
                    "or plan with what `dlrm-autoshard fit --reference` made."
                )
            return {name: self.reference.place(task)}
        size = len(task.units) * task.world_size
        mdp = EstimatedMDP(task, costs)
        if name == "dreamshard":
            most = 0 if size > MEDIUM else 16 if size > SMALL else self.settings.samples
            found = DreamShard(self.policy, self.settings, self.seed).place(mdp, min(self.settings.samples, most))
        else:
            sequence = self.sequence_trainer(copy.deepcopy(self.sequences[name]))
            if size <= SMALL and not sequence.policy.fitted.item():
                sequence.train([task], lambda _: mdp, deadline)
            found = sequence.place(mdp)
        if not found:  # every episode overflowed: the cost model's greedy knows how to make room
            found = [greedy_on_cost(task, costs)]
        return {name: found[0], **({f"{name} sample": found[1]} if len(found) > 1 else {})}

    def sequence_trainer(self, policy: SequencePolicy) -> SequenceTrainer:
        """Returns a trainer with as many updates and episodes as DreamShard's policy gets."""
        settings = SequenceSettings(
            updates=self.settings.iterations * self.settings.policy_updates,
            episodes=self.settings.episodes,
            samples=self.settings.samples,
        )
        return SequenceTrainer(policy, settings, self.seed)

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy.to_json(),
            "sequences": {name: policy.to_json() for name, policy in self.sequences.items()},
            "reference": None if self.reference is None else self.reference.to_json(),
        }

    def load_json(self, record: Mapping[str, Any]) -> None:
        self.policy.load_json(record["policy"])
        for name, policy in self.sequences.items():
            policy.load_json(record["sequences"][name])
        if record["reference"] is not None:
            self.reference = ReferenceDreamShard(self.seed, self.settings)
            self.reference.load_json(record["reference"])
