"""Fills ranks one by one with sets of units that leave almost no memory free, for loads near 100%.

    rank_U = tight_fit(units)      # None if none is found

If all memory is needed, a rank's units must add up to its memory almost exactly. Few sets do, and sums over two halves
of the units find them (Horowitz and Sahni 1974): 2 x 2^20 sums for 40 units, not 2^40.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dlrm_autoshard.planner.units import Room, Units

MOST_UNITS, MOST_SETS = 40, 2_000


def tight_fit(units: Units) -> np.ndarray | None:
    """Returns a rank per unit; None if there are too many units, or none of the first `MOST_SETS` sets leads to a legal
    placement."""
    if len(units) > MOST_UNITS:
        return None
    usable = np.flatnonzero(units.allowed_UW.any(axis=0))
    ranks = usable[np.argsort(units.allowed_UW[:, usable].sum(axis=0), kind="stable")]
    choices: list[Iterator[np.ndarray]] = [_fillings(units, Room(units), ranks)]
    rooms = [Room(units)]
    for _ in range(MOST_SETS):
        filling = next(choices[-1], None)
        if filling is None:
            choices.pop()
            rooms.pop()
            if not choices:
                return None
            continue
        room = Room(units, rooms[-1].rank_U)
        for unit in filling:
            room.place(int(unit), int(ranks[len(rooms) - 1]))
        if (room.rank_U >= 0).all():
            return room.rank_U
        if len(rooms) < len(ranks):
            choices.append(_fillings(units, room, ranks[len(rooms) :]))
            rooms.append(room)
    return None


def _fillings(units: Units, room: Room, ranks: np.ndarray) -> Iterator[np.ndarray]:
    """Yields sets of units for the first of `ranks` that leave no more memory free than all these ranks may."""
    rank, left = int(ranks[0]), np.flatnonzero(room.rank_U < 0)
    may = left[units.allowed_UW[left, rank]]
    must = left[units.allowed_UW[np.ix_(left, ranks)].sum(axis=1) == units.allowed_UW[left, rank]]
    capacity = int(units.capacity_W[rank])
    slack = int(units.capacity_W[ranks].sum() - units.bytes_U[left].sum())
    halves = may[::2], may[1::2]  # alternating, so that both halves have large units
    sums = [_subset_sums(units.bytes_U[half]) for half in halves]
    order = np.argsort(sums[1], kind="stable")
    second = sums[1][order]
    first_at = np.searchsorted(second, capacity - slack - sums[0], side="left")
    behind_at = np.searchsorted(second, capacity - sums[0], side="right")
    for subset in np.flatnonzero(behind_at > first_at).tolist():
        for at in range(int(first_at[subset]), int(behind_at[subset])):
            chosen = np.concatenate([_members(halves[0], subset), _members(halves[1], int(order[at]))])
            apart = all(rival not in chosen for unit in chosen.tolist() for rival in units.rivals[unit])
            if apart and np.isin(must, chosen).all():
                yield chosen


def _subset_sums(bytes_U: np.ndarray) -> np.ndarray:
    """Returns sums [2^U]; bit u of the index says whether unit u is included."""
    sums = np.zeros(1, dtype=np.int64)
    for size in bytes_U.tolist():
        sums = np.concatenate([sums, sums + size])
    return sums


def _members(half_U: np.ndarray, subset: int) -> np.ndarray:
    chosen: np.ndarray = half_U[(subset >> np.arange(len(half_U))) & 1 == 1]
    return chosen
