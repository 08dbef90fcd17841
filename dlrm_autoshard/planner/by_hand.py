"""Small networks trained without automatic differentiation: a multi-layer perceptron and Adam, in numpy.

    adam = FlatAdam([*net.parameters()])
    mlp = Mlp(adam.arrays, adam.gradients)
    outputs = mlp.forward(inputs); mlp.backward(gradient_of_outputs)    # into adam.gradients
    adam.step(learning_rate); adam.finish()                             # back into the torch parameters

For networks of a few thousand weights torch's cost per operation is several times the arithmetic. (And a torch
optimizer imports the compiler: a second at a job's start.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn


class FlatAdam:
    """Adam (Kingma and Ba 2015) with its usual constants on one flat array; `arrays` are views in torch's shapes."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.flat = np.concatenate([p.detach().numpy().ravel() for p in parameters])
        self.flat_gradient = np.zeros_like(self.flat)
        self.mean, self.square = np.zeros_like(self.flat), np.zeros_like(self.flat)
        self._change = np.empty_like(self.flat)
        self.updates = 0
        self.arrays = self._views(self.flat)
        self.gradients = self._views(self.flat_gradient)

    def step(self, learning_rate: float) -> None:
        self.updates += 1
        gradient, change = self.flat_gradient, self._change
        self.mean *= 0.9
        np.multiply(gradient, np.float32(0.1), out=change)
        self.mean += change
        self.square *= 0.999
        np.multiply(gradient, gradient, out=change)
        change *= np.float32(0.001)
        self.square += change
        steady = np.sqrt(1 - 0.999**self.updates)
        rate = np.float32(learning_rate * steady / (1 - 0.9**self.updates))
        np.sqrt(self.square, out=change)
        change += np.float32(1e-8 * steady)
        np.divide(self.mean, change, out=change)
        change *= rate
        self.flat -= change

    @torch.no_grad()
    def finish(self) -> None:
        """Copies the weights into the torch parameters."""
        for parameter, array in zip(self.parameters, self.arrays, strict=True):
            parameter.copy_(torch.from_numpy(array))

    def _views(self, flat: np.ndarray) -> list[np.ndarray]:
        ends = np.cumsum([parameter.numel() for parameter in self.parameters])
        return [
            flat[end - parameter.numel() : end].reshape(tuple(parameter.shape))
            for end, parameter in zip(ends, self.parameters, strict=True)
        ]


class Mlp:
    """Linear layers with ReLU between them; weights [out, in] and biases in turn, as torch keeps them."""

    def __init__(self, arrays: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> None:
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

    def backward(self, grad: np.ndarray, to_inputs: bool = True) -> np.ndarray:
        """Gradient of the inputs (unless nobody needs it); those of weights and biases are written in place."""
        for i in reversed(range(len(self.weights))):
            np.matmul(grad.T, self.inputs[i], out=self.weight_gradients[i])
            grad.sum(axis=0, out=self.bias_gradients[i])
            if i == 0 and not to_inputs:
                break
            grad = grad @ self.weights[i]
            if i:
                grad *= self.inputs[i] > 0
        return grad
