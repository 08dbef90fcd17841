"""Gradient accumulation: several backward passes, then one update of tables and weights.

pooled_BD = bags(*joined_ids(micro_batches))
for rows, part_BD in in_parts(pooled_BD, 4):
    (tower.summed_loss(part_BD, labels_B[rows]) / len(labels_B)).backward()
dense.step(); autoshard.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.step import DensePasses
from dlrm_autoshard.errors import BagsError
from dlrm_autoshard.model.dlrm import DenseArch
from dlrm_autoshard.model.jagged import Sequences


def in_parts(pooled_BD: Tensor, parts: int | Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
    """Yields the rows of each part of a batch and their pooled vectors. Call `backward()` on each part's loss before
    the next.

    Memory is needed for one part's activations only. After the last part the tables are updated once with all
    gradients, as by the whole batch: bit for bit if the dense part gives the same gradients, as SGD, Adagrad and
    row-wise Adagrad sum a row's gradients before they square them.

    pooled_BD: the result of `bags(...)` or `wait()`. parts: their number, or their sizes. Each loss is the part's share
    of the batch's. `DataParallelDense.step()` sums all parts' gradients; with DDP run all parts but the last under
    `no_sync()`.
    """
    batch = len(pooled_BD)
    if isinstance(parts, int) and not 1 <= parts <= batch:
        raise BagsError(f"a batch of {batch} samples cannot be divided into {parts} parts. Ask for 1 to {batch}.")
    if not isinstance(parts, int) and sum(parts) != batch:
        raise BagsError(f"the parts have {sum(parts)} samples, but the batch has {batch}.")
    detached = pooled_BD.detach()
    pieces = detached.tensor_split(parts) if isinstance(parts, int) else detached.split(list(parts))
    gradient_BD, first = torch.zeros_like(detached), 0
    for piece in pieces:
        rows = slice(first, first := first + len(piece))
        leaf = piece.requires_grad_(pooled_BD.requires_grad)
        yield rows, leaf
        if leaf.grad is not None:
            gradient_BD[rows] = leaf.grad
    if pooled_BD.requires_grad:
        pooled_BD.backward(gradient_BD)


def joined_ids(micro_batches: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Joins the ids of several batches: (lengths_TB, values_N) of each, or with weights_N."""
    kinds = {len(ids) for ids in micro_batches}
    if kinds not in ({2}, {3}):
        raise BagsError("each batch's ids must be a tuple (lengths_TB, values_N), or all with weights_N.")
    lengths = [ids[0] for ids in micro_batches]
    by_table = [
        [column.split(lengths_TB.sum(1).tolist()) for column in ids[1:]]
        for lengths_TB, ids in zip(lengths, micro_batches, strict=True)
    ]
    columns = (
        torch.cat([split[column][table] for table in range(len(lengths[0])) for split in by_table])
        for column in range(kinds.pop() - 1)
    )
    return torch.cat(lengths, dim=1), *columns


class PassesInParts(DensePasses):
    """Runs parts of a batch one by one, forward and backward, and updates tables and weights once. Needs memory for one
    part's activations and the whole batch's vectors.

    Equals the whole batch but for the order of additions, and for BatchNorm, which sees one part at a time."""

    def __init__(self, model: DenseArch, parts: int, *, autocast: bool) -> None:
        super().__init__(model, autocast=autocast)
        self._parts = parts
        self.gradients_made: Callable[[], None] = lambda: None

    def bottom(self, batch: Batch) -> Tensor:
        return batch.dense_BF  # each part runs its own bottom in `top`

    def top(self, bottom: Tensor, pooled: Tensor, batch: Batch, sequences: Sequences) -> Tensor:
        vectors = [own.values for own in sequences.values()]
        loss: Tensor = _InParts.apply(self, batch, sequences, pooled, *vectors)
        return loss

    def backward(self, loss: Tensor, dense: DataParallelDense) -> None:
        self.gradients_made = dense.gradients_made
        dense.backward(loss, counted=False)  # parameters already have their gradients

    def give_up(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def loss_and_gradients(self, pooled: Tensor, batch: Batch, sequences: Sequences) -> tuple[Tensor, list[Tensor]]:
        """Returns the loss, and gradients of `pooled` and of each sequence's vectors; parameters hold their own."""
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
