"""Bags of one id that a rank's batch has several times, each once, and which bag each sample's became.

sent, same = bags_once(batch, [0, 2])        # in features 0 and 2 each id has one bag; empty bags follow
same.bag_FB                                  # of each feature and sample, its bag's number in `sent`
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch

# Axes: F features, B samples of this rank, S features whose bags are sent once.


@dataclass(frozen=True)
class SameBags:
    """bag_FB: the bag of each sample. order_FB: the samples by their bags, those of one bag in the batch's order.
    ordered_FB: the bags of these."""

    bag_FB: Tensor
    order_FB: Tensor
    ordered_FB: Tensor


def bags_once(batch: Batch, features: Collection[int]) -> tuple[Batch, SameBags]:
    """Returns the batch as its ids are to be sent, with empty bags at the end of each of these features, and what
    became of its samples. A feature stays as it is where a bag has several ids, or ids have weights."""
    lengths_FB = batch.lengths_TB
    count, size = lengths_FB.shape
    bag_FB = torch.arange(size).expand(count, size)
    own = sorted(features) if batch.weights_N is None else []
    if own:
        own = [feature for feature, most in zip(own, lengths_FB[own].amax(1).tolist(), strict=True) if most <= 1]
    if not own:
        return batch, SameBags(bag_FB, bag_FB, bag_FB)
    counts = lengths_FB.sum(1).tolist()
    values = list(batch.values_N.split(counts))
    ids_of = [values[feature] for feature in own]
    if all(len(ids) == size for ids in ids_of):
        ids_SB = torch.stack(ids_of).numpy().astype(np.int64)
    else:
        ids_SB = np.full((len(own), size), -1, np.int64)
        ids_SB[lengths_FB[own].numpy() > 0] = torch.cat(ids_of).numpy()
        ids_SB[ids_SB < 0] = 2**40  # empty bags come last
    bits = size.bit_length()
    keys_SB = ids_SB << bits
    keys_SB |= np.arange(size)
    keys_SB.sort(axis=1)  # ids in ascending order, those of one in the batch's
    order_SB, sorted_SB = keys_SB & (2**bits - 1), keys_SB >> bits
    first_SB = np.ones(keys_SB.shape, np.bool_)
    np.not_equal(sorted_SB[:, 1:], sorted_SB[:, :-1], out=first_SB[:, 1:])
    ordered_SB = first_SB.cumsum(1) - 1
    bag_SB = np.empty_like(order_SB)
    np.put_along_axis(bag_SB, order_SB, ordered_SB, 1)
    sent_SB = first_SB & (sorted_SB < 2**40)
    counts_S = sent_SB.sum(1)
    lengths_FB = lengths_FB.clone()
    lengths_FB[own] = torch.from_numpy(np.arange(size) < counts_S[:, None]).to(lengths_FB.dtype)
    sent = torch.from_numpy(sorted_SB[sent_SB]).to(batch.values_N.dtype)
    for feature, ids in zip(own, sent.split(counts_S.tolist()), strict=True):
        values[feature] = ids
    if len(own) == count:
        found = [torch.from_numpy(x) for x in (bag_SB, order_SB, ordered_SB)]
    else:
        found = [bag_FB.index_copy(0, torch.tensor(own), torch.from_numpy(x)) for x in (bag_SB, order_SB, ordered_SB)]
    return replace(batch, lengths_TB=lengths_FB, values_N=torch.cat(values)), SameBags(*found)
