"""Packs ids into as few bytes as their tables' rows need, lengths into one: between hosts ids take a quarter of what
int8 vectors take.

packing = IdPacking.of(features.features)    # None if no table needs fewer bytes than the ids' dtype
parts = packing.pack([ids_of_0, ids_of_2], [0, 2])   # of features 0 and 2
ids_N = packing.unpack(packed, [0, 2], [17, 40], torch.int32)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.tables import TableConfig


class IdPacking:
    """Packs ids into as few bytes as their tables' rows need."""

    def __init__(self, widths: Sequence[int]) -> None:
        """widths: bytes per id of each feature."""
        self._widths = widths

    @staticmethod
    def of(features: Sequence[TableConfig]) -> IdPacking | None:
        widths = [max(1, -(-(feature.num_embeddings - 1).bit_length() // 8)) for feature in features]
        return IdPacking(widths) if max(widths) <= 4 and min(widths) < 4 else None

    def fits(self, batch: Batch, counts: Sequence[int]) -> bool:
        """Returns whether packing a batch loses nothing. counts: ids of each feature."""
        for ids, width in zip(batch.values_N.split(list(counts)), self._widths, strict=True):
            if len(ids):
                least, most = ids.aminmax()
                if int(least) < 0 or int(most) >= 256**width:
                    return False
        return int(batch.lengths_TB.max()) < 256

    def bytes_of(self, features: Sequence[int], counts: Sequence[int]) -> int:
        return sum(count * self._widths[feature] for feature, count in zip(features, counts, strict=True))

    def pack(self, ids: Sequence[Tensor], features: Sequence[int]) -> list[Tensor]:
        """Returns the low bytes of the ids, little-endian, in parts to be concatenated."""
        if not ids:
            return []
        raw, first, packed = _bytes_of_each(torch.cat([*ids])), 0, []
        for number, width in self._runs(features, [len(part) for part in ids]):
            packed.append(raw[first : first + number, :width].reshape(-1))
            first += number
        return packed

    def unpack(self, packed: Tensor, features: Sequence[int], counts: Sequence[int], dtype: torch.dtype) -> Tensor:
        ids_N = torch.zeros(sum(counts), dtype=dtype)
        raw, first, start = _bytes_of_each(ids_N), 0, 0
        for number, width in self._runs(features, counts):
            stop = start + number * width
            raw[first : first + number, :width] = packed[start:stop].view(number, width)
            first, start = first + number, stop
        return ids_N

    def _runs(self, features: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields (number, width) for consecutive ids of equal width."""
        widths = [self._widths[feature] for feature in features]
        for width, run in groupby(zip(widths, counts, strict=True), key=lambda pair: pair[0]):
            yield sum(count for _, count in run), width


def _bytes_of_each(ids_N: Tensor) -> Tensor:
    return ids_N.view(torch.uint8).view(-1, ids_N.element_size())
