"""Raw 32-bit categories to the rows of a table: contiguous by how often they occur, or by modulo.

    counter = FrequencyCounter()
    counter.add(np.array([7, 7, 9, 0], np.uint32))
    counter.vocabulary(min_frequency=2).encode(np.array([7, 9, 0], np.uint32))      # [2, 1, 0]

Row 0 is for missing values (raw 0), row 1 for all categories that are too rare, then one row each, frequent ones first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MISSING, RARE, FIRST_KEPT = 0, 1, 2

_PENDING_AT_LEAST = 1 << 18


@dataclass(frozen=True)
class Vocabulary:
    raw_ids: NDArray[np.uint32]  # sorted
    rows: NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        return FIRST_KEPT + len(self.raw_ids)

    def encode(self, raw_N: NDArray[np.uint32]) -> NDArray[np.int32]:
        if len(self.raw_ids) == 0:
            return np.where(raw_N == 0, MISSING, RARE).astype(np.int32)
        sorted_N, order_N = _sorted_with_order(raw_N)  # a search for sorted ids stays in the cache
        places_N = np.minimum(np.searchsorted(self.raw_ids, sorted_N), len(self.raw_ids) - 1)
        rows_N = np.empty(len(raw_N), np.int32)
        rows_N[order_N] = np.where(self.raw_ids[places_N] == sorted_N, self.rows[places_N], np.int32(RARE))
        rows_N[raw_N == 0] = MISSING
        return rows_N


@dataclass
class FrequencyCounter:
    """Counts of the distinct ids of one column. Memory: some 12 bytes a distinct id, however many ids there are."""

    raw_ids: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))  # sorted
    counts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _pending: list[NDArray[np.uint32]] = field(default_factory=list)
    _num_pending: int = 0

    def add(self, raw_N: NDArray[np.uint32]) -> None:
        self._pending.append(raw_N)
        self._num_pending += len(raw_N)
        # The larger the counts, the more ids are merged at a time, so that merging stays cheap per id.
        if self._num_pending >= max(_PENDING_AT_LEAST, len(self.raw_ids) // 2):
            self._merge()

    def vocabulary(self, min_frequency: int) -> Vocabulary:
        self._merge()
        kept = (self.counts >= min_frequency) & (self.raw_ids != 0)
        raw_ids, counts = self.raw_ids[kept], self.counts[kept]
        rows = np.empty(len(raw_ids), np.int32)
        rows[np.argsort(-counts, kind="stable")] = np.arange(FIRST_KEPT, FIRST_KEPT + len(raw_ids))
        return Vocabulary(raw_ids, rows)

    def _merge(self) -> None:
        if not self._pending:
            return
        new_ids, new_counts = _sum_by_id(np.sort(np.concatenate(self._pending)), None)
        self._pending, self._num_pending = [], 0
        both = np.concatenate([self.raw_ids, new_ids])
        both, order = _sorted_with_order(both)
        self.raw_ids, self.counts = _sum_by_id(both, np.concatenate([self.counts, new_counts])[order])


def _sorted_with_order(ids: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """The ids sorted, and where each was: sorted as one 64-bit number, several times faster than argsort."""
    pairs = ids.astype(np.uint64) << np.uint64(32)
    pairs |= np.arange(len(ids), dtype=np.uint64)
    pairs.sort()
    return (pairs >> np.uint64(32)).astype(np.uint32), pairs & np.uint64(0xFFFFFFFF)


def _sum_by_id(
    sorted_ids: NDArray[np.uint32], counts: NDArray[np.int64] | None
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Each id once, with the sum of its counts; without counts, the number of its occurrences."""
    is_first = np.ones(len(sorted_ids), bool)
    is_first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    starts = np.flatnonzero(is_first)
    if counts is None:
        return sorted_ids[starts], np.diff(starts, append=len(sorted_ids))
    return sorted_ids[starts], np.add.reduceat(counts, starts) if len(starts) else counts
