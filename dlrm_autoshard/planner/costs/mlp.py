"""The planner's one kind of network: a small multi-layer perceptron with its gradients and Adam, in numpy.

    outputs, backward = net.forward(inputs)              # net(inputs) where no gradient is wanted
    backward(gradient_of_outputs); adam.step(1e-3)       # adam = Adam(net)

For networks of a few thousand weights torch costs several times the arithmetic, an operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dlrm_autoshard.formats.arrays import array_like

Backward = Callable[..., np.ndarray]
"""From the gradient of a result to that of its inputs; those of the weights go to `Mlp.gradients` on the way."""


class Mlp:
    """Linear layers with ReLU between them; `parameters` alternates weights [out, in] and biases [out].

    final_relu: apply ReLU after the last layer, too. uniform: draw weights and biases within 1 / sqrt(inputs), as torch
    does; otherwise He et al. 2015 with zero biases.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        generator: np.random.Generator,
        *,
        final_relu: bool = False,
        uniform: bool = False,
    ) -> None:
        self.final_relu = final_relu
        self.parameters: list[np.ndarray] = []
        for fan_in, fan_out in itertools.pairwise(sizes):
            if uniform:
                weight, bias = (
                    generator.uniform(-(fan_in**-0.5), fan_in**-0.5, shape) for shape in ((fan_out, fan_in), fan_out)
                )
            else:
                weight = generator.standard_normal((fan_out, fan_in)) * (2.0 / fan_in) ** 0.5
                bias = np.zeros(fan_out)
            self.parameters += [weight.astype(np.float32), bias.astype(np.float32)]
        self.gradients = [np.zeros_like(parameter) for parameter in self.parameters]

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        return self.forward(inputs)[0]

    def forward(self, inputs: np.ndarray) -> tuple[np.ndarray, Backward]:
        """Returns [..., out] for [..., in], and the function that takes a gradient back, for a single `backward`."""
        # As one matrix: numpy multiplies a stack of small ones one by one.
        values = [inputs.reshape(-1, inputs.shape[-1])]
        last = len(self.parameters) // 2 - 1
        for layer, (weight, bias) in enumerate(zip(self.parameters[::2], self.parameters[1::2], strict=True)):
            out = values[-1] @ weight.T
            out += bias
            if layer < last or self.final_relu:
                np.maximum(out, 0, out=out)
            values.append(out)

        def backward(gradient: np.ndarray, to_inputs: bool = True) -> np.ndarray:
            grad = gradient.reshape(values[-1].shape)
            for layer in reversed(range(last + 1)):
                if layer < last or self.final_relu:
                    grad = grad * (values[layer + 1] > 0)
                np.matmul(grad.T, values[layer], out=self.gradients[2 * layer])
                grad.sum(axis=0, out=self.gradients[2 * layer + 1])
                if layer or to_inputs:
                    grad = grad @ self.parameters[2 * layer]
            return grad.reshape(*inputs.shape[:-1], -1)

        return values[-1].reshape(*inputs.shape[:-1], values[-1].shape[-1]), backward


class Adam:
    """Adam (Kingma and Ba 2015) with its usual constants, over all networks' parameters."""

    def __init__(self, *nets: Mlp) -> None:
        self.nets = nets
        self.updates = 0
        size = sum(parameter.size for net in nets for parameter in net.parameters)
        self._mean, self._square, self._change = (np.zeros(size, dtype=np.float32) for _ in range(3))

    def step(self, learning_rate: float) -> None:
        self.updates += 1
        gradient = np.concatenate([gradient.ravel() for net in self.nets for gradient in net.gradients])
        change = self._change
        self._mean *= 0.9
        np.multiply(gradient, np.float32(0.1), out=change)
        self._mean += change
        self._square *= 0.999
        np.multiply(gradient, gradient, out=change)
        change *= np.float32(0.001)
        self._square += change
        steady = np.sqrt(1 - 0.999**self.updates)
        np.sqrt(self._square, out=change)
        change += np.float32(1e-8 * steady)
        np.divide(self._mean, change, out=change)
        change *= np.float32(learning_rate * steady / (1 - 0.9**self.updates))
        start = 0
        for net in self.nets:
            for parameter in net.parameters:
                parameter -= change[start : start + parameter.size].reshape(parameter.shape)
                start += parameter.size


def weights_to_json(nets: Mapping[str, Mlp]) -> dict[str, Any]:
    """Returns weights under torch's names for a Sequential: `net.0.weight`, `net.0.bias`, `net.2.weight`, ..."""
    return {name: array.tolist() for name, array in _named(nets)}


def load_weights(nets: Mapping[str, Mlp], record: Mapping[str, Any]) -> None:
    """Loads all networks; raises FormatError if `record` lacks one or has other sizes."""
    for name, array in _named(nets):
        array[...] = array_like(record, name, array)


def _named(nets: Mapping[str, Mlp]) -> list[tuple[str, np.ndarray]]:
    return [
        (f"{name}.{i - i % 2}.{('weight', 'bias')[i % 2]}", array)
        for name, net in nets.items()
        for i, array in enumerate(net.parameters)
    ]
