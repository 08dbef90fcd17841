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
from dlrm_autoshard.model.jagged import Sequences


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

    def top(self, bottom: Tensor, pooled: Tensor, batch: Batch, sequences: Sequences) -> Tensor:
        vectors = [own.values for own in sequences.values()]
        loss: Tensor = _InParts.apply(self, batch, sequences, pooled, *vectors)
        return loss

    def backward(self, loss: Tensor, dense: DataParallelDense) -> None:
        self.gradients_made = dense.gradients_made
        dense.backward(loss, counted=False)  # parameters have their gradients already

    def give_up(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def loss_and_gradients(self, pooled: Tensor, batch: Batch, sequences: Sequences) -> tuple[Tensor, list[Tensor]]:
        """Gradients are of `pooled` and of each sequence's vectors; parameters have theirs."""
        total, gradient, first = pooled.new_zeros(()), torch.zeros_like(pooled), 0
        cut = {name: own.leaves(self._parts) for name, own in sequences.items()}
        for number, leaf in enumerate(pooled.detach().chunk(self._parts)):
            own = {name: parts[number] for name, parts in cut.items()}
            rows = slice(first, first := first + len(leaf))
            weights = None if batch.loss_weights_B is None else batch.loss_weights_B[rows]
            size = min(max(batch.size - rows.start, 0), len(leaf))
            part = replace(
                batch, dense_BF=batch.dense_BF[rows], labels_B=batch.labels_B[rows], loss_weights_B=weights, size=size
            )
            loss = super().top(super().bottom(part), leaf.requires_grad_(), part, own)
            loss.backward()
            total += loss.detach()
            if leaf.grad is not None:
                gradient[rows] = leaf.grad
        of_sequences = [
            torch.cat([torch.zeros_like(part.values) if (g := part.values.grad) is None else g for part in parts])
            for parts in cut.values()
        ]
        return total, [gradient, *of_sequences]


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passes: PassesInParts, batch: Batch, sequences: Sequences, pooled: Tensor, *vectors: Tensor
    ) -> Tensor:
        with torch.enable_grad():
            loss, ctx.gradients = passes.loss_and_gradients(pooled, batch, sequences)
        ctx.passes = passes
        return loss

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        ctx.passes.gradients_made()
        return None, None, None, *gradients
