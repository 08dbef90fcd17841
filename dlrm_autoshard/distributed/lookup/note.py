"""Sends facts about a rank's batch to all others with its bag lengths, so that ranks that differ do not wait in vain.

note_of(batch, lengths_TB)                       # the first NOTE numbers sent to each rank
values_N = agreed(arrived, values_N)             # UserError on every rank, or on none
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.errors import UserError

NOTE = 3
_PACKS = 2


def note_of(batch: Batch, like: Tensor, *, packs: bool = False) -> Tensor:
    """Returns whether ids have weights, whether they are int64, and the number of samples; in `like`'s dtype. packs:
    this rank's lengths and ids fit in few bytes."""
    kind = int(batch.values_N.dtype == torch.int64) + _PACKS * packs
    return like.new_tensor([batch.weights_N is not None, kind, batch.padded_size])


def all_pack(arrived: Tensor) -> bool:
    """Returns whether all ranks can pack. arrived: as for `agreed`."""
    return bool((arrived[:, 1] >= _PACKS).all())


def agreed(arrived: Tensor, values_N: Tensor) -> Tensor:
    """Returns the ids in the dtype that all ranks send: int64 if any needs it. UserError on all ranks if they differ.
    arrived: [W, NOTE + ...], each rank's note first."""
    said = arrived[:, :NOTE].tolist()
    (weighted, _, samples), wide = said[0], any(own[1] % _PACKS for own in said)
    for rank, (weights, _, size) in enumerate(said):
        if weights != weighted:
            one, other = (rank, 0) if weights else (0, rank)
            raise UserError(
                f"rank {one} looks up ids with weights, but rank {other} without: give weights on all ranks or on none "
                "(weights of 1 change nothing)."
            )
        if size != samples:
            raise UserError(
                f"rank {rank} looks up {size:,} samples, but rank 0 {samples:,}: all ranks must look up equally many "
                "in a step."
            )
    return values_N.long() if wide else values_N
