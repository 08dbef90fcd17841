"""Keeps each id of a batch's sequences once; expands vectors to all ids, and sums gradients of equal ids.

sent, same = rows_once(batch, [2])           # feature 2's distinct ids; only the sum of its lengths is meaningful
vectors_ND = same[0].expanded(rows_UD)
gradient_UD = same[0].summed(gradient_ND)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch

# Axes: N ids, U distinct ids, D embedding dim.


@dataclass(frozen=True)
class SameRows:
    """One sequence feature's ids. row_N: each id's index among the distinct ones, which ascend. order_N: positions of
    the ids, equal ids side by side, in the batch's order. starts_U: where each distinct id begins in order_N."""

    row_N: Tensor
    order_N: Tensor
    starts_U: Tensor
    weights_N: Tensor | None = None

    def expanded(self, rows_UD: Tensor) -> Tensor:
        """Returns the ids' vectors [N, D] from those of the distinct ids."""
        vectors_ND = rows_UD.index_select(0, self.row_N)
        return vectors_ND if self.weights_N is None else vectors_ND.mul_(self.weights_N[:, None])

    def summed(self, gradient_ND: Tensor) -> Tensor:
        """Returns gradients [U, D] of the distinct ids: those of equal ids summed in the batch's order."""
        weights_N = None if self.weights_N is None else self.weights_N[self.order_N]
        return torch.nn.functional.embedding_bag(
            self.order_N, gradient_ND.contiguous(), self.starts_U, mode="sum", per_sample_weights=weights_N
        )


def rows_once(batch: Batch, features: Collection[int]) -> tuple[Batch, list[SameRows]]:
    """Returns the batch with each id of these features once, without its weights, and how to restore the ids, by
    feature number."""
    counts = batch.lengths_TB.sum(1).tolist()
    values, lengths_TB, same = list(batch.values_N.split(counts)), batch.lengths_TB.clone(), list[SameRows]()
    weights = None if batch.weights_N is None else list(batch.weights_N.split(counts))
    for number in sorted(features):
        ids_N, order_N = values[number].sort(stable=True)
        first_N = torch.ones(len(ids_N), dtype=torch.bool)
        torch.ne(ids_N[1:], ids_N[:-1], out=first_N[1:])
        row_N = torch.empty_like(order_N).index_copy_(0, order_N, first_N.cumsum(0) - 1)
        starts_U = first_N.nonzero().view(-1)
        same.append(SameRows(row_N, order_N, starts_U, None if weights is None else weights[number]))
        values[number] = ids_N[starts_U]
        lengths_TB[number] = _shared_out(len(starts_U), lengths_TB.shape[1])
        if weights is not None:
            weights[number] = weights[number].new_ones(len(starts_U))
    joined = None if weights is None else torch.cat(weights)
    return replace(batch, lengths_TB=lengths_TB, values_N=torch.cat(values), weights_N=joined), same


def _shared_out(ids: int, bags: int) -> Tensor:
    """Returns lengths [bags] that differ by at most one, so that none is too long for packed ids."""
    return torch.full((bags,), ids // bags) + (torch.arange(bags) < ids % bags)


def ids_and_different(batch: Batch, features: Collection[int]) -> tuple[int, int]:
    """Returns the number of ids of these features, and of distinct ids within each feature."""
    by_feature = batch.values_N.split(batch.lengths_TB.sum(1).tolist())
    ids = [by_feature[number] for number in features]
    return sum(map(len, ids)), sum(len(own.unique()) for own in ids)
