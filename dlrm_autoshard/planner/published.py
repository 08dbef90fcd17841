"""DreamShard to the letter (Zha et al., NeurIPS 2022), weak points included, to compare ours with.

    published = PublishedDreamShard(seed=0)
    published.train(tasks, measure)              # measure(task, plans) -> profiles
    rank_U = published.place(task)               # likeliest device for each table, one pass

Kept as it was, on purpose: features standardised over the task's own tables (so that a table's features change with
its companions), an empty device counted as one average table, three cost heads (no forward exchange), an overall cost
from the maximum over device embeddings, a policy that does not see the table it places, log-probabilities over all
devices though sampling was masked by memory. Where no device has room the reference crashed; here the episode goes to
the roomiest device, and a plan that overflows is replaced by a legal one.

Axes: T tables, D devices, E episodes, P placements, R tables of all tasks side by side, 3 heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.by_hand import FlatAdam, Mlp
from dlrm_autoshard.planner.cost_model import mlp
from dlrm_autoshard.planner.dreamshard import DreamShardSettings
from dlrm_autoshard.planner.features import NUM_PUBLISHED, published_features
from dlrm_autoshard.planner.frozen import FrozenNet
from dlrm_autoshard.planner.greedy import balance
from dlrm_autoshard.planner.masked import gumbel_noise
from dlrm_autoshard.planner.task import PlacementTask, Room

HEADS = 3  # forward computation, backward computation, backward communication
MeasureTask = Callable[[PlacementTask, Sequence[ShardingPlan]], list[StepProfile]]


class PublishedCostNet(nn.Module):
    """21-128-32 a table, summed over a device, 32-64-1 a head; maximum over devices, 32-64-1 for the overall cost."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.table_net = mlp([NUM_PUBLISHED, 128, 32], generator)
        self.hidden = mlp([32, HEADS * 64], generator)  # the first layers of the three heads, side by side
        self.last_H64 = nn.Parameter(torch.randn(HEADS, 64, generator=generator) / 8)
        self.bias_H = nn.Parameter(torch.zeros(HEADS))
        self.overall_net = mlp([32, 64, 1], generator)

    def heads(self, devices: Tensor) -> Tensor:
        """[..., D, 3] from device embeddings [..., D, 32]."""
        hidden = self.hidden(devices).relu().unflatten(-1, (HEADS, 64))
        return (hidden * self.last_H64).sum(dim=-1) + self.bias_H

    def overall(self, devices: Tensor) -> Tensor:
        overall: Tensor = self.overall_net(devices.amax(dim=-2)).squeeze(-1)
        return overall


class PublishedPolicy(nn.Module):
    """21-128-32 a table, summed over a device; its three costs through 3-64-32; one logit a device."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.table_net = mlp([NUM_PUBLISHED, 128, 32], generator)
        self.cost_net = mlp([HEADS, 64, 32], generator)
        self.logit = mlp([64, 1], generator)

    def logits(self, devices: Tensor, costs: Tensor) -> Tensor:
        both = torch.cat([devices, self.cost_net(costs)], dim=-1)
        logits: Tensor = self.logit(both).squeeze(-1)
        return logits


@dataclass(frozen=True)
class Measured:
    """A placement in the buffer: rank of each table, the three stages of every device, and the task's cost."""

    task: int
    rank_T: np.ndarray
    heads_D3: np.ndarray
    overall: float


@dataclass(frozen=True)
class Episodes:
    order: np.ndarray
    actions_TE: np.ndarray
    costs_TED3: np.ndarray
    predicted_E: np.ndarray


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
        optimizer = torch.optim.Adam(self.policy.parameters(), lr=settings.learning_rate, fused=True)
        self.trained_iterations = 0
        for iteration in range(settings.iterations):
            optimizer.param_groups[0]["lr"] = settings.learning_rate * (1 - iteration / settings.iterations)
            for number in self.generator.integers(len(tasks), size=settings.placements):
                episode = self.rollout(tasks[number], features[number], episodes=1)
                buffer.append(_measured(tasks[number], int(number), episode, measure))
            self._update_cost_net(features, buffer, training)
            for number in self.generator.integers(len(tasks), size=settings.policy_updates):
                episodes = self.rollout(tasks[number], features[number], settings.episodes)
                self._update_policy(features[number], episodes, tasks[number].world_size, optimizer)
            self.trained_iterations += 1

    def place(self, task: PlacementTask) -> np.ndarray:
        """[U] ranks: the likeliest device at each step; evened out by lookups instead where that overflows."""
        return _legal_units(task, self.rollout(task, scaled_by_task(task), episodes=0))

    @torch.no_grad()
    def rollout(self, task: PlacementTask, features: Tensor, episodes: int) -> Episodes:
        """`episodes` sampled side by side; 0: one episode of the likeliest devices."""
        tables, devices, count = len(features) - 1, task.world_size, max(episodes, 1)
        cost_embedding = self.cost_net.table_net(features)
        order = np.argsort(-self.cost_net.overall(cost_embedding[:-1].unsqueeze(1)).numpy(), kind="stable")
        embedding, held_of = cost_embedding.numpy(), self.policy.table_net(features).numpy()
        head_net, overall_net = FrozenNet(self.cost_net.hidden), FrozenNet(self.cost_net.overall_net)
        last, bias = self.cost_net.last_H64.numpy(), self.cost_net.bias_H.numpy()
        cost_net, logit_net = FrozenNet(self.policy.cost_net), FrozenNet(self.policy.logit)
        noise = gumbel_noise((tables, count, devices), self.generator) if episodes else np.zeros((tables, 1, 1))

        rows = np.arange(count)
        sums = np.tile(embedding[-1], (count, devices, 1))  # an empty device is one average table
        held = np.tile(held_of[-1], (count, devices, 1))
        empty = np.ones((count, devices), dtype=bool)
        table_bytes = np.array([task.table_bytes[name] for name in task.names], dtype=np.int64)
        allowed_TD = task.units.allowed_UW[task.units.unit_of_T]
        free = np.tile(task.units.capacity_W, (count, 1))
        actions = np.empty((tables, count), dtype=np.int64)
        costs = np.empty((tables, count, devices, HEADS), dtype=np.float32)
        for step, table in enumerate(order):
            hidden = np.maximum(head_net(sums), 0).reshape(count, devices, HEADS, 64)
            costs[step] = (hidden * last).sum(axis=-1) + bias
            logits = logit_net(np.concatenate([held, cost_net(costs[step])], axis=-1))[..., 0]
            left = free - table_bytes[table]
            legal = (left >= 0) & allowed_TD[table]
            legal |= ~legal.any(axis=1, keepdims=True) & (left == left.max(axis=1, keepdims=True))
            action = (np.where(legal, logits, -np.inf) + noise[step]).argmax(axis=1)
            first = empty[rows, action][:, None]
            sums[rows, action] = np.where(first, 0, sums[rows, action]) + embedding[table]
            held[rows, action] = np.where(first, 0, held[rows, action]) + held_of[table]
            empty[rows, action] = False
            free[rows, action] -= table_bytes[table]
            actions[step] = action
        return Episodes(order, actions, costs, overall_net(sums.max(axis=1))[:, 0])

    def _update_cost_net(self, features: list[Tensor], buffer: list[Measured], training: CostNetTraining) -> None:
        """`cost_updates` steps on batches of 64."""
        placements = _stacked(features, buffer)
        learning_rate = self.settings.learning_rate * (1 - self.trained_iterations / self.settings.iterations)
        for _ in range(self.settings.cost_updates):
            training.gradients(placements, self.generator.integers(len(buffer), size=self.settings.cost_batch))
            training.adam.step(learning_rate)
        training.adam.finish()

    def _update_policy(
        self, features: Tensor, episodes: Episodes, num_devices: int, optimizer: torch.optim.Adam
    ) -> None:
        """REINFORCE; the log-probabilities are those over all devices, as in the reference."""
        reward = torch.from_numpy(-episodes.predicted_E)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-9)
        embedding = self.policy.table_net(features)
        actions = torch.from_numpy(episodes.actions_TE)
        placed = nn.functional.one_hot(actions, num_devices).unsqueeze(-1)
        added = placed * embedding[episodes.order][:, None, None, :]
        before = placed.cumsum(dim=0) - placed
        held = torch.where(before > 0, added.cumsum(dim=0) - added, embedding[-1])
        log_probs = self.policy.logits(held, torch.from_numpy(episodes.costs_TED3)).log_softmax(dim=-1)
        taken = log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1).sum(dim=0)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1).mean()
        loss = -(advantage * taken).mean() - self.settings.entropy_weight * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

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


def _legal_units(task: PlacementTask, episode: Episodes) -> np.ndarray:
    rank_T = np.empty(len(task.tables), dtype=np.int64)
    rank_T[episode.order] = episode.actions_TE[:, 0]
    room = Room(task.units)
    for unit, members in enumerate(task.units.members):
        rank = int(rank_T[members[0]])
        if not room.legal_W(unit)[rank]:
            lookups = [t.embedding_dim * s.mean_pooling for t, s in zip(task.tables, task.stats, strict=True)]
            return balance(task, task.units.sum_over_tables(np.array(lookups)))
        room.place(unit, rank)
    return room.rank_U


def _measured(task: PlacementTask, number: int, episode: Episodes, measure: MeasureTask) -> Measured:
    rank_U = _legal_units(task, episode)
    [profile] = measure(task, [task.plan_from(rank_U)])
    heads = np.array([(r.fwd_compute_ms, r.bwd_compute_ms, r.bwd_comms_ms) for r in profile.ranks], dtype=np.float32)
    return Measured(number, rank_U[task.units.unit_of_T], heads, max(rank.total_ms for rank in profile.ranks))


@dataclass(frozen=True)
class Placements:
    """The buffer as arrays: all tasks' tables [R, 21]; [P, D, R] who owns what; [P, D] which devices exist; costs."""

    features_RF: np.ndarray
    owned_PDR: np.ndarray
    present_PD: np.ndarray
    heads_PD3: np.ndarray
    overall_P: np.ndarray


def _stacked(features: list[Tensor], buffer: list[Measured]) -> Placements:
    starts = np.cumsum([0] + [len(rows) for rows in features])
    devices = max(len(placement.heads_D3) for placement in buffer)
    owned = np.zeros((len(buffer), devices, int(starts[-1])), dtype=np.float32)
    present = np.zeros((len(buffer), devices), dtype=bool)
    heads = np.zeros((len(buffer), devices, HEADS), dtype=np.float32)
    for p, placement in enumerate(buffer):
        count = len(placement.heads_D3)
        owned[p, placement.rank_T, np.arange(len(placement.rank_T)) + starts[placement.task]] = 1.0
        empty = np.setdiff1d(np.arange(count), placement.rank_T)
        owned[p, empty, starts[placement.task + 1] - 1] = 1.0  # the all-zero table
        present[p, :count] = True
        heads[p, :count] = placement.heads_D3
    overall = np.array([placement.overall for placement in buffer], dtype=np.float32)
    return Placements(torch.cat(features).numpy(), owned, present, heads, overall)


class CostNetTraining:
    """The cost network's loss, gradients written out: the sum of the heads' and the overall cost's MSE."""

    def __init__(self, net: PublishedCostNet) -> None:
        groups = [[*part.parameters()] for part in (net.table_net, net.hidden, net.overall_net)]
        self.adam = FlatAdam([net.last_H64, net.bias_H, *(p for group in groups for p in group)])
        ends = np.cumsum([2, *(len(group) for group in groups)])
        self.table_net, self.hidden, self.overall_net = (
            Mlp(self.adam.arrays[a:b], self.adam.gradients[a:b]) for a, b in itertools.pairwise(ends)
        )

    def gradients(self, placements: Placements, chosen: np.ndarray) -> float:
        """The mean loss of the `chosen` placements; its gradient goes to `adam`."""
        last_H64, bias_H = self.adam.arrays[:2]
        present = placements.present_PD[chosen]
        batch, devices = present.shape
        owned_NR = placements.owned_PDR[chosen].reshape(batch * devices, -1)
        devices_N32 = owned_NR @ self.table_net.forward(placements.features_RF)
        hidden = np.maximum(self.hidden.forward(devices_N32), 0).reshape(-1, HEADS, 64)
        heads = (hidden * last_H64).sum(axis=-1) + bias_H
        error_N3 = (heads - placements.heads_PD3[chosen].reshape(-1, HEADS)) * present.reshape(-1, 1)
        existing = np.where(present[..., None], devices_N32.reshape(batch, devices, -1), -1e9)
        largest = existing.argmax(axis=1)[:, None, :]
        overall = self.overall_net.forward(np.take_along_axis(existing, largest, axis=1)[:, 0])
        error_B = overall[:, 0] - placements.overall_P[chosen]

        grad_N3 = error_N3 * np.float32(2 / present.sum())
        self.adam.gradients[0][:] = np.einsum("nh,nhk->hk", grad_N3, hidden)
        self.adam.gradients[1][:] = grad_N3.sum(axis=0)
        grad_hidden = grad_N3[..., None] * last_H64 * (hidden > 0)
        grad_devices = self.hidden.backward(grad_hidden.reshape(len(hidden), -1))
        grad_largest = self.overall_net.backward(error_B[:, None] * np.float32(2 / batch))
        through_max = np.zeros_like(existing, dtype=np.float32)
        np.put_along_axis(through_max, largest, grad_largest[:, None, :], axis=1)
        grad_devices += through_max.reshape(grad_devices.shape)
        self.table_net.backward(owned_NR.T @ grad_devices)
        return float((error_N3**2).sum() / present.sum() + (error_B**2).mean())
