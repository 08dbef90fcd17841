"""Trains the cost model's two networks in numpy, gradients written out by hand.

    training = CostTraining(model, shards)
    for chosen in batches:                      # indices of shards
        training.gradients(chosen)              # into training.flat_gradient
        training.step(learning_rate)            # Adam
    training.finish()                           # weights back into the model

The networks are so small that automatic differentiation is nearly all overhead (1 ms an update, against 0.2): written
out, a job's start and every refinement between epochs are done in a fraction of a second. A test holds the gradients
to torch's.

Axes: R different tables, N shards of a batch, S = 2 stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from dlrm_autoshard.planner.cost_model import (
    FUSION_BOUND,
    LOAD_COLUMNS,
    NUM_LOGS,
    TABLE_BOUND,
    CostModel,
    ShardSet,
)

HUBER = 0.02
"""Relative errors below this count squared, above it absolutely: outliers of a noisy machine do not pull."""
LOG2_SCALE = 1 / (6 * np.log(2))


class CostTraining:
    def __init__(self, model: CostModel, shards: ShardSet) -> None:
        nets = (model.table_net, model.device_net)
        parameters = [parameter for net in nets for parameter in net.parameters()]
        self.parameters = parameters
        self.flat = np.concatenate([p.detach().numpy().ravel() for p in parameters])
        self.flat_gradient = np.zeros_like(self.flat)
        self.mean, self.square = np.zeros_like(self.flat), np.zeros_like(self.flat)
        self.updates = 0
        arrays = _views(self.flat, [tuple(p.shape) for p in parameters])
        gradients = _views(self.flat_gradient, [tuple(p.shape) for p in parameters])
        split = 2 * sum(isinstance(layer, nn.Linear) for layer in model.table_net)
        self.table_net = _Mlp(arrays[:split], gradients[:split])
        self.device_net = _Mlp(arrays[split:], gradients[split:])

        self.features_RF = shards.features_RF.numpy()
        self.base_RS = (shards.work_RP @ model.prices_PS).numpy()
        self.launch_S = model.launch_S.numpy().copy()
        self.members_NM = shards.members_NM.numpy()
        self.log_target_NS = shards.target_NS.log().numpy()
        loads_RL = torch.cat([torch.ones(len(self.base_RS), 1), shards.work_RP[:, LOAD_COLUMNS]], dim=1)
        loads_NL = shards.sum_over_tables(loads_RL).numpy()
        self.count_N1 = loads_NL[:, :1]
        self.log_count_N1 = np.log2(self.count_N1) / 6
        self.log_loads_NL = np.log2(np.maximum(loads_NL[:, 1:], 1e-3)) / 6

    def gradients(self, chosen: np.ndarray) -> float:
        """The batch's mean loss; its gradient goes to `flat_gradient`."""
        inside_NR = np.zeros((len(chosen), len(self.base_RS) + 1), dtype=np.float32)
        inside_NR[np.arange(len(chosen))[:, None], self.members_NM[chosen]] = 1.0
        inside_NR = inside_NR[:, :-1]  # the last column is padding

        out_RO = self.table_net.forward(self.features_RF)
        bent_RS = np.tanh(out_RO[:, :2] / TABLE_BOUND)
        cost_RS = self.base_RS * np.exp(TABLE_BOUND * bent_RS)
        count_N1 = self.count_N1[chosen]
        sums_NO = inside_NR @ np.concatenate([cost_RS, out_RO[:, 2:]], axis=1)
        cost_NS = sums_NO[:, :2]
        clamped_NS = np.maximum(cost_NS, 1e-3)
        inputs = np.concatenate(
            [
                self.log_count_N1[chosen],
                np.log2(clamped_NS) / 6,
                self.log_loads_NL[chosen],
                sums_NO[:, 2:] / count_N1,
            ],
            axis=1,
        )
        bent_NS = np.tanh(self.device_net.forward(inputs))
        raw_NS = cost_NS + self.launch_S
        error_NS = np.log(raw_NS) + FUSION_BOUND * bent_NS - self.log_target_NS[chosen]

        grad_NS = np.clip(error_NS / HUBER, -1, 1) / error_NS.size
        grad_inputs = self.device_net.backward(grad_NS * FUSION_BOUND * (1 - bent_NS**2))
        grad_cost_NS = grad_NS / raw_NS + grad_inputs[:, 1:3] * (LOG2_SCALE / clamped_NS) * (cost_NS > 1e-3)
        grad_embed = grad_inputs[:, NUM_LOGS:] / count_N1
        grad_RO = inside_NR.T @ np.concatenate([grad_cost_NS, grad_embed], axis=1)
        grad_RO[:, :2] *= cost_RS * (1 - bent_RS**2)
        self.table_net.backward(grad_RO)
        size = np.abs(error_NS)
        return float(np.where(size < HUBER, size**2 / (2 * HUBER), size - HUBER / 2).mean())

    def step(self, learning_rate: float) -> None:
        """Adam (Kingma and Ba 2015) with its usual constants."""
        self.updates += 1
        gradient = self.flat_gradient
        self.mean += 0.1 * (gradient - self.mean)
        self.square += 0.001 * (gradient * gradient - self.square)
        rate = learning_rate * np.sqrt(1 - 0.999**self.updates) / (1 - 0.9**self.updates)
        self.flat -= np.float32(rate) * self.mean / (np.sqrt(self.square) + 1e-8)

    @torch.no_grad()
    def finish(self) -> None:
        arrays = _views(self.flat, [tuple(p.shape) for p in self.parameters])
        for parameter, array in zip(self.parameters, arrays, strict=True):
            parameter.copy_(torch.from_numpy(array))


class _Mlp:
    """Linear layers with ReLU between them; weights [out, in] and biases in turn, as torch keeps them."""

    def __init__(self, arrays: list[np.ndarray], gradients: list[np.ndarray]) -> None:
        self.weights, self.biases = arrays[::2], arrays[1::2]
        self.weight_gradients, self.bias_gradients = gradients[::2], gradients[1::2]
        self.inputs: list[np.ndarray] = []

    def forward(self, values: np.ndarray) -> np.ndarray:
        self.inputs = []
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            self.inputs.append(values)
            values = values @ weight.T
            values += bias
            if i < len(self.weights) - 1:
                np.maximum(values, 0, out=values)
        return values

    def backward(self, grad: np.ndarray) -> np.ndarray:
        """Gradient of the inputs; those of weights and biases are written in place."""
        for i in reversed(range(len(self.weights))):
            np.matmul(grad.T, self.inputs[i], out=self.weight_gradients[i])
            grad.sum(axis=0, out=self.bias_gradients[i])
            grad = grad @ self.weights[i]
            if i:
                grad *= self.inputs[i] > 0
        return grad


def _views(flat: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Consecutive pieces of a flat array in these shapes, sharing its memory."""
    views, start = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        views.append(flat[start : start + size].reshape(shape))
        start += size
    return views
