"""Compares gradients written by hand with finite differences of their loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dlrm_autoshard.planner.costs.mlp import Mlp


def assert_gradients_of(loss: Callable[[], float], nets: Sequence[Mlp], more: int = 4) -> None:
    """`nets` hold the gradients of `loss()`, which is computed anew with their weights moved a little."""
    generator = np.random.default_rng(0)
    arrays = [parameter for net in nets for parameter in net.parameters]
    gradients = [gradient.copy() for net in nets for gradient in net.gradients]  # `loss` may write anew
    size = np.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
    assert size > 0
    for number in range(len(arrays) + more):
        # Along one array at a time at first, so that none hides behind a larger one; then along all.
        along = [
            generator.standard_normal(a.shape) if i == number or number >= len(arrays) else np.zeros(a.shape)
            for i, a in enumerate(arrays)
        ]
        wanted = sum(float((gradient * direction).sum()) for gradient, direction in zip(gradients, along, strict=True))
        found = _slope(loss, arrays, along)
        length = np.sqrt(sum(float((direction**2).sum()) for direction in along))
        assert abs(found - wanted) < 1e-4 * size * length, (number, found, wanted)


def _slope(loss: Callable[[], float], arrays: Sequence[np.ndarray], along: Sequence[np.ndarray]) -> float:
    step, kept, at = 1e-6, [array.copy() for array in arrays], []
    for sign in (1, -1):
        for array, start, direction in zip(arrays, kept, along, strict=True):
            array[...] = start + sign * step * direction
        at.append(loss())
    for array, start in zip(arrays, kept, strict=True):
        array[...] = start
    return (at[0] - at[1]) / (2 * step)


def in_double_precision(*nets: Mlp) -> None:
    for net in nets:
        net.parameters = [parameter.astype(np.float64) for parameter in net.parameters]
        net.gradients = [gradient.astype(np.float64) for gradient in net.gradients]
