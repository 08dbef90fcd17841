"""DreamShard to the letter (Zha et al., NeurIPS 2022), weak points included, to compare ours with.

    published = PublishedDreamShard(seed=0)
    published.train(tasks, measure)              # measure(task, plans) -> profiles
    rank_U = published.place(task)               # likeliest device for each table, one pass

Kept as it was, on purpose: features standardised over the task's own tables (so that a table's features change with
its companions), an empty device counted as one average table, three cost heads (no forward exchange), an overall cost
from the maximum over device embeddings, a policy that does not see the table it places, log-probabilities over all
devices though sampling was masked by memory. Where no device has room the reference crashed; here the episode goes to
the roomiest device, and a plan that overflows is replaced by a legal one.

Its networks and their training are in `published_costs` and `published_policy`.

Axes: T tables, D devices, E episodes, 3 heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm_autoshard.planner.baselines.reference_costs import (
    HEADS,
    CostNetTraining,
    Measured,
    MeasureTask,
    PublishedCostNet,
    heads_matrix,
    measured,
    stacked,
)
from dlrm_autoshard.planner.baselines.reference_policy import Episodes, PublishedPolicy, PublishedPolicyTraining
from dlrm_autoshard.planner.dreamshard import DreamShardSettings
from dlrm_autoshard.planner.features import NUM_PUBLISHED, published_features
from dlrm_autoshard.planner.frozen import FrozenNet
from dlrm_autoshard.planner.greedy import balance
from dlrm_autoshard.planner.masked import gumbel_noise
from dlrm_autoshard.planner.task import PlacementTask, Room


class PublishedDreamShard:
    def __init__(self, seed: int = 0, settings: DreamShardSettings = DreamShardSettings()) -> None:
        weights = torch.Generator().manual_seed(seed)
        self.settings = settings
        self.generator = np.random.default_rng(seed)
        self.cost_net = PublishedCostNet(weights)
        self.policy = PublishedPolicy(weights)
        self.trained_iterations = 0

    def train(self, tasks: Sequence[PlacementTask], measure: MeasureTask) -> None:
        """Algorithm 1: collect placements, update the cost network, update the policy; over and over."""
        settings = self.settings
        features = [scaled_by_task(task) for task in tasks]
        buffer: list[Measured] = []
        training = CostNetTraining(self.cost_net)
        policy_training = PublishedPolicyTraining(self.policy)
        self.trained_iterations = 0
        for iteration in range(settings.iterations):
            learning_rate = settings.learning_rate * (1 - iteration / settings.iterations)
            picks = np.bincount(self.generator.integers(len(tasks), size=settings.placements))
            for number in np.flatnonzero(picks).tolist():
                episodes = self.rollout(tasks[number], features[number], int(picks[number]))
                for actions_T in episodes.actions_TE.T:
                    rank_U = _legal_units(tasks[number], episodes.order, actions_T)
                    buffer.append(measured(tasks[number], int(number), rank_U, measure))
            self._update_cost_net(features, buffer, training, learning_rate)
            for number in self.generator.integers(len(tasks), size=settings.policy_updates):
                episodes = self.rollout(tasks[number], features[number], settings.episodes)
                policy_training.gradients(features[number].numpy(), episodes, settings.entropy_weight)
                policy_training.adam.step(learning_rate)
                policy_training.adam.finish()
            self.trained_iterations += 1

    def place(self, task: PlacementTask) -> np.ndarray:
        """[U] ranks: the likeliest device at each step; evened out by lookups instead where that overflows."""
        likeliest = self.rollout(task, scaled_by_task(task), episodes=0)
        return _legal_units(task, likeliest.order, likeliest.actions_TE[:, 0])

    @torch.no_grad()
    def rollout(self, task: PlacementTask, features: Tensor, episodes: int) -> Episodes:
        """`episodes` sampled side by side; 0: one episode of the likeliest devices."""
        tables, devices, count = len(features) - 1, task.world_size, max(episodes, 1)
        cost_embedding = self.cost_net.table_net(features)
        order = np.argsort(-self.cost_net.overall(cost_embedding[:-1].unsqueeze(1)).numpy(), kind="stable")
        embedding, held_of = cost_embedding.numpy(), self.policy.table_net(features).numpy()
        head_net, overall_net = FrozenNet(self.cost_net.hidden), FrozenNet(self.cost_net.overall_net)
        last, bias = heads_matrix(self.cost_net.last_H64.numpy()), self.cost_net.bias_H.numpy()
        cost_net, logit_net = FrozenNet(self.policy.cost_net), FrozenNet(self.policy.logit)
        noise = gumbel_noise((tables, count, devices), self.generator) if episodes else np.zeros((tables, 1, 1))

        def of_devices(sums: np.ndarray, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """[..., 3] predicted costs and [...] logits of devices with these sums of embeddings."""
            costs = np.maximum(head_net(sums), 0) @ last + bias
            return costs, logit_net(np.concatenate([held, cost_net(costs)], axis=-1))[..., 0]

        rows = np.arange(count)
        sums = np.tile(embedding[-1], (count, devices, 1))  # an empty device is one average table
        held = np.tile(held_of[-1], (count, devices, 1))
        empty = np.ones((count, devices), dtype=bool)
        table_bytes = np.array([task.table_bytes[name] for name in task.names], dtype=np.int64)
        allowed_TD = task.units.allowed_UW[task.units.unit_of_T]
        free = np.tile(task.units.capacity_W, (count, 1))
        actions = np.empty((tables, count), dtype=np.int64)
        costs = np.empty((tables, count, devices, HEADS), dtype=np.float32)
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
        return Episodes(order, actions, costs, overall_net(sums.max(axis=1))[:, 0])

    def _update_cost_net(
        self, features: list[Tensor], buffer: list[Measured], training: CostNetTraining, learning_rate: float
    ) -> None:
        """`cost_updates` steps on batches of 64."""
        placements = stacked(features, buffer)
        for _ in range(self.settings.cost_updates):
            training.gradients(placements, self.generator.integers(len(buffer), size=self.settings.cost_batch))
            training.adam.step(learning_rate)
        training.adam.finish()

    def state_dict(self) -> dict[str, Any]:
        nets = {"cost_net": self.cost_net, "policy": self.policy}
        state = {name: {k: v.tolist() for k, v in net.state_dict().items()} for name, net in nets.items()}
        return {**state, "trained_iterations": self.trained_iterations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, net in (("cost_net", self.cost_net), ("policy", self.policy)):
            net.load_state_dict({k: torch.tensor(v) for k, v in state[name].items()})
        self.trained_iterations = int(state["trained_iterations"])


def scaled_by_task(task: PlacementTask) -> Tensor:
    """[T + 1, 21] standardised over this task's tables; the last row, all zero, stands for an empty device."""
    raw = published_features(task.tables, task.stats)
    spread = raw.std(axis=0)
    scaled = (raw - raw.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    return torch.from_numpy(np.concatenate([scaled, np.zeros((1, NUM_PUBLISHED))])).float()


def _legal_units(task: PlacementTask, order: np.ndarray, actions_T: np.ndarray) -> np.ndarray:
    rank_T = np.empty(len(task.tables), dtype=np.int64)
    rank_T[order] = actions_T
    room = Room(task.units)
    for unit, members in enumerate(task.units.members):
        rank = int(rank_T[members[0]])
        if not room.legal_W(unit)[rank]:
            lookups = [t.embedding_dim * s.mean_pooling for t, s in zip(task.tables, task.stats, strict=True)]
            return balance(task, task.units.sum_over_tables(np.array(lookups)))
        room.place(unit, rank)
    return room.rank_U
