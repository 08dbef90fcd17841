"""Maps raw 32-bit categories to rows of a table by how often they occur.

    counter.add(np.array([7, 7, 9, 0], np.uint32))
    counter.vocabulary(min_frequency=2).encode(np.array([7, 9, 0], np.uint32))      # [2, 1, 0]

Row 0 is for missing values (raw 0), row 1 for all rare categories; then one row each, most frequent first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MISSING, RARE, FIRST_KEPT = 0, 1, 2
PENDING_AT_LEAST = 1 << 18
"""Ids that a counter buffers before merging them into its counts."""

_SPREAD = np.uint32(0x9E3779B1)  # 2^32 / golden ratio: spreads successive ids over the slots


class Vocabulary:
    """Finds the row of each raw id in a hash table with linear probing.

    All ids take each probe together as arrays; searching a sorted list took several times as long.
    """

    def __init__(self, raw_ids: NDArray[np.uint32], rows: NDArray[np.int32]) -> None:
        """raw_ids: distinct, and not 0, which marks a free slot."""
        self.num_rows = FIRST_KEPT + len(raw_ids)
        self.by_row = raw_ids[np.argsort(rows)]
        bits = max(1, 2 * len(raw_ids) - 1).bit_length()  # at most half of the slots are taken
        self._shift, self._last_slot = np.uint32(32 - bits), np.uint32(2**bits - 1)
        self._raw_ids, self._rows = np.zeros(2**bits, np.uint32), np.full(2**bits, RARE, np.int32)
        slots = self._first_slots(raw_ids)
        while len(raw_ids):
            free = self._raw_ids[slots] == 0
            self._raw_ids[slots[free]] = raw_ids[free]  # of several ids for a slot, one stays
            placed = self._raw_ids[slots] == raw_ids
            self._rows[slots[placed]] = rows[placed]
            raw_ids, rows, slots = raw_ids[~placed], rows[~placed], self._next(slots[~placed])

    @classmethod
    def of_rows(cls, by_row: NDArray[np.uint32]) -> Vocabulary:
        """Restores a vocabulary from its `by_row`: the raw ids of rows FIRST_KEPT and up."""
        return cls(by_row, np.arange(FIRST_KEPT, FIRST_KEPT + len(by_row), dtype=np.int32))

    def encode(self, raw_N: NDArray[np.uint32]) -> NDArray[np.int32]:
        slots_N = self._first_slots(raw_N)
        found_N = self._raw_ids[slots_N]
        rows_N = self._rows[slots_N]  # RARE in a free slot
        others = np.flatnonzero((found_N != raw_N) & (found_N != 0))
        while len(others):
            slots_N[others] = slots = self._next(slots_N[others])
            rows_N[others] = self._rows[slots]
            found = self._raw_ids[slots]
            others = others[(found != raw_N[others]) & (found != 0)]
        rows_N[raw_N == 0] = MISSING
        return rows_N

    def _first_slots(self, raw_N: NDArray[np.uint32]) -> NDArray[np.uint32]:
        return (raw_N * _SPREAD) >> self._shift

    def _next(self, slots: NDArray[np.uint32]) -> NDArray[np.uint32]:
        return (slots + np.uint32(1)) & self._last_slot


@dataclass
class FrequencyCounter:
    """Counts the distinct ids of one column, with about 12 bytes of memory per distinct id."""

    raw_ids: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))  # sorted
    counts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _pending: list[NDArray[np.uint32]] = field(default_factory=list)
    _num_pending: int = 0

    def add(self, raw_N: NDArray[np.uint32]) -> None:
        self._pending.append(raw_N)
        self._num_pending += len(raw_N)
        # Merges more ids at a time as counts grow, so that the cost per id stays low.
        if self._num_pending >= max(PENDING_AT_LEAST, len(self.raw_ids) // 2):
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
    """Returns the ids sorted and where each was. Sorts pairs as one 64-bit number, several times faster than
    argsort."""
    pairs = ids.astype(np.uint64) << np.uint64(32)
    pairs |= np.arange(len(ids), dtype=np.uint64)
    pairs.sort()
    return (pairs >> np.uint64(32)).astype(np.uint32), pairs & np.uint64(0xFFFFFFFF)


def _sum_by_id(
    sorted_ids: NDArray[np.uint32], counts: NDArray[np.int64] | None
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Returns each id once with the sum of its counts, or without counts the number of its occurrences."""
    is_first = np.ones(len(sorted_ids), bool)
    is_first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    starts = np.flatnonzero(is_first)
    if counts is None:
        return sorted_ids[starts], np.diff(starts, append=len(sorted_ids))
    return sorted_ids[starts], np.add.reduceat(counts, starts) if len(starts) else counts
