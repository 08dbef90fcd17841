"""The dense part's passes over a batch in parts, for batches whose activations do not fit in memory at once.

passes = PassesInParts(model, parts, autocast=False)         # in the place of DensePasses
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.dense_passes import DensePasses
from dlrm_autoshard.model.dlrm import DenseArch


class PassesInParts(DensePasses):
    """Runs the parts one after the other, each forward and backward: memory is needed for one part's activations, and
    for the whole batch's vectors. Gradients are added up, and tables and weights are updated once: as by the whole
    batch, but for the order in which numbers are added, and for BatchNorm, which sees a part at a time."""

    def __init__(self, model: DenseArch, parts: int, *, autocast: bool) -> None:
        super().__init__(model, autocast=autocast)
        self._parts = parts
        self.gradients_made: Callable[[], None] = lambda: None

    def bottom(self, batch: Batch) -> Tensor:
        return batch.dense_BF  # of each part in turn

    def top(self, bottom: Tensor, pooled: Tensor, batch: Batch) -> Tensor:
        loss: Tensor = _InParts.apply(pooled, self, batch)
        return loss

    def backward(self, loss: Tensor, dense: DataParallelDense) -> None:
        self.gradients_made = dense.gradients_made
        dense.backward(loss, counted=False)  # parameters have their gradients already

    def give_up(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def loss_and_gradient(self, pooled: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The gradient is of `pooled`; parameters have theirs."""
        total, gradient, first = pooled.new_zeros(()), torch.zeros_like(pooled), 0
        for leaf in pooled.detach().chunk(self._parts):
            rows = slice(first, first := first + len(leaf))
            weights = None if batch.loss_weights_B is None else batch.loss_weights_B[rows]
            size = min(max(batch.size - rows.start, 0), len(leaf))
            part = replace(
                batch, dense_BF=batch.dense_BF[rows], labels_B=batch.labels_B[rows], loss_weights_B=weights, size=size
            )
            loss = super().top(super().bottom(part), leaf.requires_grad_(), part)
            loss.backward()
            total += loss.detach()
            if leaf.grad is not None:
                gradient[rows] = leaf.grad
        return total, gradient


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: Tensor, passes: PassesInParts, batch: Batch) -> Tensor:
        with torch.enable_grad():
            loss, ctx.gradient = passes.loss_and_gradient(pooled, batch)
        ctx.passes = passes
        return loss

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        ctx.passes.gradients_made()
        return gradient, None, None
