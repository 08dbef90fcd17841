"""Vectors of sequences, such as a user's last clicks, of all samples one after another.

vectors_BLD, mask_BL = history.padded(50)        # for an attention over the last fifty
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Jagged:
    """Sequences of B samples. values: [N, D], sample 0's first, each in the order of its ids. lengths: [B], sum N."""

    values: Tensor
    lengths: Tensor

    def padded(self, max_length: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns vectors [B, L, D], padded with zeros at the end, and a mask [B, L], True for vectors that exist.

        max_length: L; longer sequences keep their last L vectors. None: the longest sequence's length."""
        lengths_B = self.lengths.long()
        size = int(lengths_B.max()) if max_length is None else max_length
        mask_BL = torch.arange(size, device=lengths_B.device) < lengths_B.clamp(max=size)[:, None]
        if torch.compiler.is_exporting():  # a program without data-dependent sizes; its backward is slower
            first_B = lengths_B.cumsum(0) - lengths_B.clamp(max=size)
            place_BL = (first_B[:, None] + torch.arange(size)).clamp(max=self.values.shape[0] - 1)
            return self.values[place_BL].masked_fill(~mask_BL[:, :, None], 0), mask_BL
        sample_N = torch.arange(len(lengths_B), device=lengths_B.device).repeat_interleave(lengths_B)
        behind_N = torch.arange(len(self.values), device=lengths_B.device) - (lengths_B.cumsum(0) - lengths_B)[sample_N]
        place_N = behind_N - (lengths_B - size).clamp(min=0)[sample_N]
        values, place_N = self.values, sample_N * size + place_N.where(place_N >= 0, len(lengths_B) * size)
        if bool((lengths_B > size).any()):
            kept = place_N < len(lengths_B) * size
            values, place_N = values[kept], place_N[kept]
        padded = values.new_zeros(len(lengths_B) * size, values.shape[1]).index_copy(0, place_N, values)
        return padded.view(len(lengths_B), size, values.shape[1]), mask_BL

    def first(self, samples: int) -> Jagged:
        """Returns the sequences of the first `samples` samples; all later ones must be empty."""
        return replace(self, lengths=self.lengths[:samples])

    def leaves(self, parts: int) -> list[Jagged]:
        """Cuts samples as `Tensor.chunk` does; each part's vectors are leaves of autograd."""
        lengths = self.lengths.chunk(parts)
        values = self.values.detach().split([int(own.sum()) for own in lengths])
        return [Jagged(part.requires_grad_(), own) for part, own in zip(values, lengths, strict=True)]


Sequences = Mapping[str, Jagged]
"""Vectors that are not pooled, by feature name; empty for most models."""


class Looked(NamedTuple):
    """The result of a lookup: pooled vectors [B, D], and sequences by name."""

    pooled: Tensor
    sequences: Sequences
