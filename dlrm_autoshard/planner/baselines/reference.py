"""The reference DreamShard, to the letter (Zha et al., NeurIPS 2022, and its code), to compare ours with.

reference = ReferenceDreamShard(seed=0)
reference.train(tasks, measure)              # measure(task, plans) -> profiles
rank_U = reference.place(task)               # likeliest device for each table, one pass
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm_autoshard.formats.json_file import checked
from dlrm_autoshard.formats.numbers import Count
from dlrm_autoshard.planner.baselines.reference_nets import (
    HEADS,
    Episodes,
    Kernels,
    Placements,
    ReferenceCostNet,
    ReferencePolicy,
)
from dlrm_autoshard.planner.costs.features import NUM_RAW, raw_features
from dlrm_autoshard.planner.costs.mlp import Adam, load_weights, weights_to_json
from dlrm_autoshard.planner.dreamshard.masked import gumbel_noise
from dlrm_autoshard.planner.dreamshard.settings import PUBLISHED, DreamShardSettings
from dlrm_autoshard.planner.search.greedy import greedy
from dlrm_autoshard.planner.task import MeasureTask, PlacementTask
from dlrm_autoshard.planner.units import Room

STANDARDISED = slice(1, 4)
"""Rows, pooling factor and size, over the task's own tables; dim and reuse bins go in raw."""


@dataclass(frozen=True)
class Measured:
    """A placement in the buffer: the rank of each of a task's tables, every device's three heads, and the costliest
    device's ms."""

    task: int
    rank_T: np.ndarray
    heads_D3: np.ndarray
    overall: float


class ReferenceDreamShard:
    """Trains and places as the published code does, its weak points included: a table's features change with its
    companions, an empty device counts as one table of zeros, there is no head for the forward exchange, and the policy
    does not see the table it places. Its log-probabilities are over all devices though sampling was masked by memory.

    Where no device has room the published code crashes. Here the episode goes to the device with most room, and a plan
    that overflows is replaced by a legal one. Tables that must stay together share the rank of the first.

    Axes: T tables, D devices, E episodes, 3 heads; `reference_nets` has more.
    """

    def __init__(self, seed: int = 0, settings: DreamShardSettings = PUBLISHED) -> None:
        weights = np.random.default_rng([seed, 1])
        self.settings = settings
        self.generator = np.random.default_rng(seed)
        self.cost_net = ReferenceCostNet(weights)
        self.policy = ReferencePolicy(weights)
        self.trained_iterations = 0

    def train(self, tasks: Sequence[PlacementTask], measure: MeasureTask) -> None:
        """Runs Algorithm 1: collects placements, updates the cost network, updates the policy, and starts over."""
        settings = self.settings
        features = [scaled_by_task(task) for task in tasks]
        placements: list[Measured] = []
        adam, policy_adam = Adam(*self.cost_net.nets.values()), Adam(*self.policy.nets.values())
        for iteration in range(settings.iterations):
            learning_rate = settings.learning_rate * (1 - iteration / settings.iterations)
            for number in self.generator.integers(len(tasks), size=settings.placements).tolist():
                episode = self.rollout(tasks[number], features[number], 1)
                rank_U = _legal_units(tasks[number], episode.order, episode.actions_TE[:, 0])
                placements.append(measured(tasks[number], number, rank_U, measure))
            buffer = Buffer(features, placements)
            for _ in range(settings.cost_updates):
                self.cost_net.gradients(buffer.features_RF, *buffer.draw(settings.cost_batch, self.generator))
                adam.step(learning_rate)
            for number in self.generator.integers(len(tasks), size=settings.policy_updates).tolist():
                episodes = self.rollout(tasks[number], features[number], settings.episodes)
                self.policy.gradients(features[number], episodes, settings.entropy_weight)
                policy_adam.step(learning_rate)
            self.trained_iterations += 1

    def place(self, task: PlacementTask) -> np.ndarray:
        """Returns ranks [U]: the likeliest device at each step. Where that overflows, units are spread by lookups
        instead."""
        likeliest = self.rollout(task, scaled_by_task(task), episodes=0)
        return _legal_units(task, likeliest.order, likeliest.actions_TE[:, 0])

    def rollout(self, task: PlacementTask, features_RF: np.ndarray, episodes: int) -> Episodes:
        """Returns `episodes` sampled at once; 0: one episode of the likeliest devices."""
        tables, devices, count = len(features_RF) - 1, task.world_size, max(episodes, 1)
        embedding, held_of = self.cost_net.table_net(features_RF), self.policy.table_net(features_RF)
        order = np.argsort(-self.cost_net.heads(embedding[:-1])[0].sum(axis=1), kind="stable")
        noise = gumbel_noise((tables, count, devices), self.generator) if episodes else np.zeros((tables, 1, 1))

        def of_devices(sums: np.ndarray, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Returns predicted costs [..., 3] and logits [...] of devices with these sums of embeddings."""
            costs = self.cost_net.heads(sums)[0]
            return costs, self.policy.logits(held, costs)[0]

        rows = np.arange(count)
        sums = np.tile(embedding[-1], (count, devices, 1))
        held = np.tile(held_of[-1], (count, devices, 1))
        empty = np.ones((count, devices), dtype=bool)
        table_bytes = np.array([task.table_bytes[name] for name in task.names], dtype=np.int64)
        allowed_TD = task.units.allowed_UW[task.units.unit_of_T]
        free = np.tile(task.units.capacity_W, (count, 1))
        actions = np.empty((tables, count), dtype=np.int64)
        costs = np.empty((tables, count, devices, len(HEADS)), dtype=np.float32)
        costs_now, logits = of_devices(sums, held)
        for step, table in enumerate(order):
            costs[step] = costs_now
            left = free - table_bytes[table]
            legal = (left >= 0) & allowed_TD[table]
            legal |= ~legal.any(axis=1, keepdims=True) & (left == left.max(axis=1, keepdims=True))
            action = (np.where(legal, logits, -np.inf) + noise[step]).argmax(axis=1)
            at = (rows, action)  # a step changes these devices; only their numbers are computed anew
            kept = ~empty[at][:, None]
            sums[at] = sums[at] * kept + embedding[table]
            held[at] = held[at] * kept + held_of[table]
            costs_now[at], logits[at] = of_devices(sums[at], held[at])
            empty[at] = False
            free[at] -= table_bytes[table]
            actions[step] = action
        return Episodes(order, actions, costs, self.cost_net.overall(sums)[0])

    def to_json(self) -> dict[str, Any]:
        return {
            "cost_net": weights_to_json(self.cost_net.nets),
            "policy": weights_to_json(self.policy.nets),
            "trained_iterations": self.trained_iterations,
        }

    def load_json(self, record: Mapping[str, Any]) -> None:
        load_weights(self.cost_net.nets, record.get("cost_net", {}))
        load_weights(self.policy.nets, record.get("policy", {}))
        self.trained_iterations = checked(Count, record.get("trained_iterations"))


class Buffer:
    """Holds the placements measured so far, and draws devices and placements independently, uniformly, with
    replacement."""

    def __init__(self, features: Sequence[np.ndarray], placements: Sequence[Measured]) -> None:
        starts = np.cumsum([0] + [len(rows) - 1 for rows in features])
        self.features_RF = np.concatenate([*(rows[:-1] for rows in features), features[0][-1:]])
        devices = max(len(placement.heads_D3) for placement in placements)
        self.owned_PDR = np.zeros((len(placements), devices, len(self.features_RF)), dtype=np.float32)
        for owned_DR, placement in zip(self.owned_PDR, placements, strict=True):
            owned_DR[placement.rank_T, np.arange(len(placement.rank_T)) + starts[placement.task]] = 1
            empty = np.bincount(placement.rank_T, minlength=len(placement.heads_D3)) == 0
            owned_DR[np.flatnonzero(empty), -1] = 1
        self.overall_P = np.array([placement.overall for placement in placements], dtype=np.float32)
        exists = self.owned_PDR.any(axis=2)  # a task with fewer devices than another leaves rows of zeros
        self.device_of = np.flatnonzero(exists)
        self.heads_N3 = np.concatenate([placement.heads_D3 for placement in placements])

    def draw(self, count: int, generator: np.random.Generator) -> tuple[Kernels, Placements]:
        placements = generator.integers(len(self.overall_P), size=count)
        devices = generator.integers(len(self.device_of), size=count)
        owned = self.owned_PDR.reshape(-1, len(self.features_RF))[self.device_of[devices]]
        return Kernels(owned, self.heads_N3[devices]), Placements(
            self.owned_PDR[placements], self.overall_P[placements]
        )


def measured(task: PlacementTask, number: int, rank_U: np.ndarray, measure: MeasureTask) -> Measured:
    """Returns a legal placement of task `number` with its measurements."""
    [profile] = measure(task, [task.plan_from(rank_U)])
    heads = np.array([[rank.stage(stage) for stage in HEADS] for rank in profile.ranks], dtype=np.float32)
    return Measured(number, rank_U[task.units.unit_of_T], heads, max(rank.total_ms for rank in profile.ranks))


def scaled_by_task(task: PlacementTask) -> np.ndarray:
    """Returns scaled features [T + 1, 21]; the last row, all zeros, stands for what an empty device holds."""
    raw = raw_features(task.tables, task.stats)
    spread = raw[:, STANDARDISED].std(axis=0)
    raw[:, STANDARDISED] -= raw[:, STANDARDISED].mean(axis=0)
    raw[:, STANDARDISED] /= np.where(spread > 0, spread, 1.0)  # the reference divides by 0 here
    return np.concatenate([raw, np.zeros((1, NUM_RAW))]).astype(np.float32)


def _legal_units(task: PlacementTask, order: np.ndarray, actions_T: np.ndarray) -> np.ndarray:
    rank_T = np.empty(len(task.tables), dtype=np.int64)
    rank_T[order] = actions_T
    room = Room(task.units)
    for unit, members in enumerate(task.units.members):
        rank = int(rank_T[members[0]])
        if not room.legal_W(unit)[rank]:
            return greedy(task, "lookup_greedy")
        room.place(unit, rank)
    return room.rank_U
