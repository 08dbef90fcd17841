"""The cost network of the published DreamShard, and its training on the placements that were measured.

    buffer.append(measured(task, number, rank_U, measure))
    training = CostNetTraining(net)
    training.gradients(stacked(features, buffer), chosen); training.adam.step(learning_rate); training.adam.finish()

Gradients are written out (see `by_hand`); a test holds them to torch's.

Axes: T tables, D devices, P placements of the buffer, R tables of all tasks side by side, N = devices of a batch of
placements, 3 heads of 64 hidden units.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.by_hand import FlatAdam, Mlp
from dlrm_autoshard.planner.cost_model import mlp
from dlrm_autoshard.planner.features import NUM_PUBLISHED
from dlrm_autoshard.planner.task import PlacementTask

HEADS = 3  # forward computation, backward computation, backward communication
HIDDEN = 64
MeasureTask = Callable[[PlacementTask, Sequence[ShardingPlan]], list[StepProfile]]


class PublishedCostNet(nn.Module):
    """21-128-32 a table, summed over a device, 32-64-1 a head; maximum over devices, 32-64-1 for the overall cost."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.table_net = mlp([NUM_PUBLISHED, 128, 32], generator)
        self.hidden = mlp([32, HEADS * HIDDEN], generator)  # the first layers of the three heads, side by side
        self.last_H64 = nn.Parameter(torch.randn(HEADS, HIDDEN, generator=generator) / 8)
        self.bias_H = nn.Parameter(torch.zeros(HEADS))
        self.overall_net = mlp([32, 64, 1], generator)

    def heads(self, devices: Tensor) -> Tensor:
        """[..., D, 3] from device embeddings [..., D, 32]."""
        hidden = self.hidden(devices).relu().unflatten(-1, (HEADS, HIDDEN))
        return (hidden * self.last_H64).sum(dim=-1) + self.bias_H

    def overall(self, devices: Tensor) -> Tensor:
        overall: Tensor = self.overall_net(devices.amax(dim=-2)).squeeze(-1)
        return overall


@dataclass(frozen=True)
class Measured:
    """A placement in the buffer: rank of each table, the three stages of every device, and the task's cost."""

    task: int
    rank_T: np.ndarray
    heads_D3: np.ndarray
    overall: float


def measured(task: PlacementTask, number: int, rank_U: np.ndarray, measure: MeasureTask) -> Measured:
    """A legal placement of task `number`, measured."""
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


def stacked(features: list[Tensor], buffer: list[Measured]) -> Placements:
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


def heads_matrix(last_H64: np.ndarray) -> np.ndarray:
    """[192, 3]: the last layers of the three heads as one matrix; each reads its own 64 hidden units."""
    matrix = np.zeros((HEADS, HIDDEN, HEADS), dtype=last_H64.dtype)
    matrix[np.arange(HEADS), :, np.arange(HEADS)] = last_H64
    return matrix.reshape(HEADS * HIDDEN, HEADS)


class CostNetTraining:
    """The cost network's loss, gradients written out: the sum of the heads' and the overall cost's MSE."""

    def __init__(self, net: PublishedCostNet) -> None:
        groups = [[*part.parameters()] for part in (net.table_net, net.hidden, net.overall_net)]
        self.adam = FlatAdam([net.last_H64, net.bias_H, *(p for group in groups for p in group)])
        ends = np.cumsum([2, *(len(group) for group in groups)])
        self.table_net, self.hidden, self.overall_net = (
            Mlp(self.adam.arrays[a:b], self.adam.gradients[a:b]) for a, b in itertools.pairwise(ends)
        )

    def gradients(self, placements: Placements, chosen: np.ndarray) -> None:
        """The gradient of the mean loss of the `chosen` placements goes to `adam`."""
        times_P = np.bincount(chosen, minlength=len(placements.overall_P))
        different = np.flatnonzero(times_P)  # a placement that was drawn three times is computed once, and counts three
        times = times_P[different].astype(np.float32)
        present = placements.present_PD[different]
        batch, devices = present.shape
        weight_N1 = (present * times[:, None]).reshape(-1, 1)
        weight_N1 *= 1 / weight_N1.sum()
        weight_B = times / len(chosen)

        last = heads_matrix(self.adam.arrays[0])
        owned_NR = placements.owned_PDR[different].reshape(batch * devices, -1)
        devices_N32 = owned_NR @ self.table_net.forward(placements.features_RF)
        hidden = self.hidden.forward(devices_N32)
        np.maximum(hidden, 0, out=hidden)
        error_N3 = hidden @ last + self.adam.arrays[1] - placements.heads_PD3[different].reshape(-1, HEADS)
        existing = np.where(present[..., None], devices_N32.reshape(batch, devices, -1), np.float32(-1e9))
        largest_B32 = existing.argmax(axis=1)
        at = (np.arange(batch)[:, None], largest_B32, np.arange(existing.shape[2]))
        error_B = self.overall_net.forward(existing[at])[:, 0] - placements.overall_P[different]

        grad_N3 = 2 * weight_N1 * error_N3
        self.adam.gradients[0][:] = (grad_N3.T @ hidden).reshape(HEADS, HEADS, HIDDEN)[
            np.arange(HEADS), np.arange(HEADS)
        ]
        self.adam.gradients[1][:] = grad_N3.sum(axis=0)
        grad_hidden = grad_N3 @ last.T
        grad_hidden *= hidden > 0
        grad_devices = self.hidden.backward(grad_hidden)
        through_max = grad_devices.reshape(existing.shape)
        through_max[at] += self.overall_net.backward((2 * weight_B * error_B)[:, None])
        self.table_net.backward(owned_NR.T @ grad_devices, to_inputs=False)
