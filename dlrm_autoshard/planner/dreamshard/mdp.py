"""The estimated MDP: places units one by one, with the cost model in place of hardware.

mdp = EstimatedMDP(task, costs)
rollout = mdp.rollout(policy, noise_EUD)        # E episodes at once; noise None: the likeliest device each time
rollout.rank_EU, rollout.cost_E                 # placements and their predicted step cost
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dlrm_autoshard.planner.costs.features import network_features
from dlrm_autoshard.planner.costs.mlp import Backward
from dlrm_autoshard.planner.search.greedy_on_cost import StageLoads
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts

NUM_FEATURES = 15
"""Per device: 4 stages now, 4 with the unit, 4 of how far that is above the slowest now, room left, work left, RISE."""
RISE = NUM_FEATURES - 1
"""How much the device's load (see `StageLoads`) rises by the unit, over where it rises least; in logs."""
MOST_RISE, LEAST_RISE = 5.0, 1e-20


class Policy(Protocol):
    """Networks that score devices for the next unit."""

    def embed(self, features_TF: np.ndarray) -> tuple[np.ndarray, Backward]:
        """Returns table embeddings [T, H]. A unit's is the sum over its tables, a device's over its units."""
        ...

    def logits(self, inputs_EDF: np.ndarray) -> tuple[np.ndarray, Backward]:
        """Returns logits [E, D] from features, the device's and the unit's embeddings, concatenated."""
        ...


@dataclass(frozen=True)
class Rollout:
    """Episodes, step by step in the order of placing: inputs [U, E, D, F + 2 H], legal [U, E, D], actions [U, E]."""

    mdp: EstimatedMDP
    inputs: np.ndarray
    legal: np.ndarray
    actions: np.ndarray
    cost_E: np.ndarray
    overflow_E: np.ndarray

    @property
    def rank_EU(self) -> np.ndarray:
        ranks = np.empty_like(self.actions.T)
        ranks[:, self.mdp.order] = self.actions.T
        return ranks


class EstimatedMDP:
    """One task under one cost model.

    Units go in descending order of predicted cost alone. A step shows the policy, for every device, what it costs now
    and what it would cost with this unit, and the policy's own embeddings of the unit and of the device's units. The
    reward is 0 until the end, then minus the predicted overall cost.

    If no device has room, the unit goes (with probability 1, so without gradient) to the device with most room, and the
    episode counts as overflowing; its placement is never returned.

    Axes: E episodes, U units, D devices, K summary columns, F features, H policy embedding.
    """

    def __init__(self, task: PlacementTask, costs: TaskCosts) -> None:
        self.task = task
        self.costs = costs
        units = task.units
        alone = costs.alone_ms()
        self.order = np.argsort(-alone, kind="stable")
        # Costs are shown as fractions of an even share, so that tasks of any size are alike.
        self.share = np.float32(max(float(alone.sum()) / len(task.topology.usable_ranks), 1e-6))
        self.summary = costs.summary_UK[self.order]
        alone_U4 = costs.stage_ms(costs.summary_UK, np.full(len(alone), costs.fastest)) / self.share
        empty_4 = costs.stage_ms(np.zeros_like(costs.summary_UK[:1]), np.array([costs.fastest]))[0] / self.share
        self.loads = StageLoads(alone_U4, empty_4, len(task.topology.usable_ranks))
        left = alone[self.order][::-1].cumsum()[::-1]
        self.work_left = np.append(left[1:], 0.0) / max(left[0], 1e-9)
        self.bytes = units.bytes_U[self.order]
        self.capacity = np.maximum(units.capacity_W, 1)  # a rank without memory divides by 1, not by 0
        self.allowed = units.allowed_UW[self.order]
        place_of = np.argsort(self.order)
        self.rivals = [[r for r in units.rivals[u] if place_of[r] < step] for step, u in enumerate(self.order)]
        self.step_of_T = place_of[units.unit_of_T]
        self.features_TF = network_features(task.tables, task.stats, task.batch_size).astype(np.float32)

    def embed_units(self, policy: Policy) -> np.ndarray:
        """Returns embeddings of units [U, H], in the order of placing."""
        embedded, _ = policy.embed(self.features_TF)
        units = np.zeros((len(self.order), embedded.shape[1]), dtype=embedded.dtype)
        np.add.at(units, self.step_of_T, embedded)
        return units

    def legal(self, step: int, free_ED: np.ndarray, chosen_EU: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns ([E, D] legal devices for this step's unit, [E] whether none had room, so the roomiest is used)."""
        left = free_ED - self.bytes[step]
        legal: np.ndarray = (left >= 0) & self.allowed[step]
        rows = np.arange(len(free_ED))
        for rival in self.rivals[step]:
            legal[rows, chosen_EU[:, rival]] = False
        stuck = np.logical_not(legal.any(axis=1))
        if stuck.any():
            roomiest = np.where(self.allowed[step], left, np.iinfo(np.int64).min).argmax(axis=1)
            legal[rows[stuck], roomiest[stuck]] = True
        return legal, stuck

    def rollout(self, policy: Policy, noise_EUD: np.ndarray | None = None, for_loss: bool = True) -> Rollout:
        """Runs episodes at once: one per row of Gumbel noise; without noise only the likeliest.

        for_loss: keep every step's inputs, which training needs.
        """
        steps, devices = len(self.order), self.task.world_size
        episodes = 1 if noise_EUD is None else len(noise_EUD)
        unit_UH = self.embed_units(policy)
        rows = np.arange(episodes)
        sums = np.zeros((episodes, devices, self.summary.shape[1]), dtype=np.float32)
        stages = self.costs.stages(sums) / self.share
        loads = self.loads(stages)
        free = np.tile(self.task.units.capacity_W, (episodes, 1))
        overflow = np.zeros(episodes, dtype=bool)
        inputs = np.zeros((episodes, devices, NUM_FEATURES + 2 * unit_UH.shape[1]), dtype=np.float32)
        held = inputs[..., NUM_FEATURES : NUM_FEATURES + unit_UH.shape[1]]
        kept = steps if for_loss else 0
        inputs_seen = np.empty((kept, *inputs.shape), dtype=np.float32)
        legals = np.empty((kept, episodes, devices), dtype=bool)
        actions = np.empty((steps, episodes), dtype=np.int64)
        chosen = np.empty((episodes, steps), dtype=np.int64)  # by unit number
        for step in range(steps):
            with_unit = self.costs.stages(sums + self.summary[step]) / self.share
            left = free - self.bytes[step]
            inputs[..., :4] = stages
            inputs[..., 4:8] = with_unit
            loads_with = self.loads(with_unit)
            rise = np.log(np.maximum(loads_with - loads, LEAST_RISE))
            inputs[..., RISE] = np.minimum(rise - rise.min(axis=1, keepdims=True), MOST_RISE)
            inputs[..., 8:12] = with_unit - stages.max(axis=1, keepdims=True)
            inputs[..., 12] = left / self.capacity
            inputs[..., 13] = self.work_left[step]
            inputs[..., NUM_FEATURES + unit_UH.shape[1] :] = unit_UH[step]
            legal, stuck = self.legal(step, free, chosen)
            overflow |= stuck
            logits = np.where(legal, policy.logits(inputs)[0], -np.inf)
            # Logits + Gumbel noise: the argmax is a sample of exp(masked_log_probs(logits, legal)).
            action = (logits if noise_EUD is None else logits + noise_EUD[:, step]).argmax(axis=1)
            if for_loss:
                inputs_seen[step], legals[step] = inputs, legal
            sums[rows, action] += self.summary[step]
            held[rows, action] += unit_UH[step]
            stages[rows, action] = with_unit[rows, action]
            loads[rows, action] = loads_with[rows, action]
            free[rows, action] -= self.bytes[step]
            chosen[:, self.order[step]] = action
            actions[step] = action
        cost_E = self.costs.total_ms(stages * self.share, sums)
        return Rollout(self, inputs_seen, legals, actions, cost_E, overflow)
