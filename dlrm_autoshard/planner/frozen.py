"""A trained network as numpy arrays: for search and rollouts, which make thousands of small evaluations.

    net = FrozenNet(model.device_net)
    net(inputs)                       # what model.device_net gives, without torch's cost per call

On inputs of a few dozen rows a torch call is all overhead (about 5 microseconds an operation against 1).
"""

from __future__ import annotations

import numpy as np
from torch import nn


class FrozenNet:
    """Linear layers with ReLU between them."""

    def __init__(self, net: nn.Sequential) -> None:
        self.layers = [
            (layer.weight.detach().numpy().T.copy(), layer.bias.detach().numpy().copy())
            for layer in net
            if isinstance(layer, nn.Linear)
        ]

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        # As one matrix: numpy multiplies a stack of small ones one by one.
        values = inputs.reshape(-1, inputs.shape[-1])
        for i, (weight, bias) in enumerate(self.layers):
            values = values @ weight
            values += bias
            if i < len(self.layers) - 1:
                np.maximum(values, 0, out=values)
        return values.reshape(*inputs.shape[:-1], -1)
