"""The different ids of a batch's sequences, each once: which of them each id was, and sums over those that are one.

sent, same = rows_once(batch, [2])           # of feature 2 each id once; its lengths only add up to how many there are
vectors_ND = same[0].expanded(rows_UD)
gradient_UD = same[0].summed(gradient_ND)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch

# Axes: N ids, U different ones, D embedding dims.


@dataclass(frozen=True)
class SameRows:
    """One sequence's ids. row_N: the number of each one's row among the different ones, which are in ascending order.
    order_N: the ids' places, those of one row side by side, in the batch's order. starts_U: where each row's begin."""

    row_N: Tensor
    order_N: Tensor
    starts_U: Tensor
    weights_N: Tensor | None = None

    def expanded(self, rows_UD: Tensor) -> Tensor:
        """[N, D] vectors of the ids, from those of the different ones."""
        vectors_ND = rows_UD.index_select(0, self.row_N)
        return vectors_ND if self.weights_N is None else vectors_ND.mul_(self.weights_N[:, None])

    def summed(self, gradient_ND: Tensor) -> Tensor:
        """[U, D] gradients of the different ids: the ids' own, added up in the batch's order."""
        weights_N = None if self.weights_N is None else self.weights_N[self.order_N]
        return torch.nn.functional.embedding_bag(
            self.order_N, gradient_ND.contiguous(), self.starts_U, mode="sum", per_sample_weights=weights_N
        )


def rows_once(batch: Batch, features: Collection[int]) -> tuple[Batch, list[SameRows]]:
    """Returns the batch with each id of these features once, without weights of theirs, and what became of their ids,
    in the order of the features' numbers."""
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
    """[bags] lengths, as equal as can be: none is long, whatever their number is packed in."""
    return torch.full((bags,), ids // bags) + (torch.arange(bags) < ids % bags)


def ids_and_different(batch: Batch, features: Collection[int]) -> tuple[int, int]:
    """How many ids these features have, and how many of them differ within their feature."""
    by_feature = batch.values_N.split(batch.lengths_TB.sum(1).tolist())
    ids = [by_feature[number] for number in features]
    return sum(map(len, ids)), sum(len(own.unique()) for own in ids)
