"""Gradient accumulation in a custom training loop: several backward passes, then one update of tables and weights.

pooled_BD = bags(*joined_ids(micro_batches))
for rows, part_BD in in_parts(pooled_BD, 4):
    (tower.summed_loss(part_BD, labels_B[rows]) / len(labels_B)).backward()
dense.step(); autoshard.step()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dlrm_autoshard.errors import BagsError


def in_parts(pooled_BD: Tensor, parts: int | Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
    """Yields the rows of each part of a batch and their pooled vectors, to be trained on by a `backward()` of its own
    before the next: memory is needed for one part's activations. After the last, the tables are updated once, with all
    gradients, as by the whole batch: to the bit where the dense part gives the same gradients, for SGD, Adagrad and
    row-wise Adagrad alike, which add up a row's gradients before they square them.

    pooled_BD: what `bags(...)` or `wait()` gave. parts: their number, or their sizes. Each part's loss is its share of
    the batch's. `DataParallelDense.step()` sums what all parts gave; with DDP all parts but the last go under
    `no_sync()`.
    """
    batch = len(pooled_BD)
    if isinstance(parts, int) and not 1 <= parts <= batch:
        raise BagsError(f"a batch of {batch} samples was to be taken in {parts} parts. Ask for 1 to {batch}.")
    if not isinstance(parts, int) and sum(parts) != batch:
        raise BagsError(f"the parts have {sum(parts)} samples, and the batch has {batch}.")
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
    """Returns the ids of several batches as one batch's: (lengths_TB, values_N), or with weights_N, of each."""
    kinds = {len(ids) for ids in micro_batches}
    if kinds not in ({2}, {3}):
        raise BagsError("each batch's ids are a tuple (lengths_TB, values_N), or with weights_N, alike in all.")
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
