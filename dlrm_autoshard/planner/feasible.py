"""Finds any legal placement, or the reason why there is none.

    rank_U = feasible(task)      # PlanError if nothing fits: "table 'ad_id' needs 6.2 GiB; ..."

Bin packing is NP-hard, so methods go from cheap to thorough; only an exhausted search proves that nothing fits.
"""

from __future__ import annotations

import numpy as np

from dlrm_autoshard.formats.words import gib
from dlrm_autoshard.plan import PlanError
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.tight_fit import tight_fit
from dlrm_autoshard.planner.units import Room, Units

SEARCH_STEPS = 20_000


def feasible(task: PlacementTask) -> np.ndarray:
    """Returns a rank per unit; PlanError if no placement is legal, or none was found; the message says which.

    Places the largest unit first on the rank with most room, then on the tightest that takes it, each with a repair
    step (move one smaller unit elsewhere); then searches depth-first for SEARCH_STEPS; then fills ranks with sets of
    units.
    """
    units = task.units
    _check_each_fits(task)
    order = sorted(
        range(len(units)),
        key=lambda u: (units.allowed_UW[u].sum(), -len(units.rivals[u]), -int(units.bytes_U[u]), u),
    )
    for tightest in (False, True):
        room = Room(units)
        stuck = None
        for unit in order:
            legal = np.flatnonzero(room.legal_W(unit))
            if len(legal):
                free = room.free_W[legal]
                room.place(unit, int(legal[free.argmin() if tightest else free.argmax()]))
            elif not make_room(room, unit):
                stuck = unit
                break
        if stuck is None:
            return room.rank_U
    found, exhausted = _depth_first(units, order)
    if found is None and not exhausted:
        found = tight_fit(units)
    if found is not None:
        return found
    raise _nothing_fits(task, room, stuck if stuck is not None else order[-1], exhausted)


def make_room(room: Room, unit: int) -> bool:
    """Places `unit` by moving one other unit from its new rank elsewhere; False if no single move suffices."""
    units = room.units
    allowed = np.flatnonzero(units.allowed_UW[unit])
    for rank in allowed[np.argsort(-room.free_W[allowed], kind="stable")]:
        guests = np.flatnonzero(room.rank_U == rank)
        for guest in guests[np.argsort(units.bytes_U[guests], kind="stable")]:
            if room.free_W[rank] + units.bytes_U[guest] < units.bytes_U[unit]:
                continue
            room.remove(int(guest))
            if room.legal_W(unit)[rank]:
                room.place(unit, int(rank))
                elsewhere = np.flatnonzero(room.legal_W(int(guest)))
                if len(elsewhere):
                    room.place(int(guest), int(elsewhere[room.free_W[elsewhere].argmax()]))
                    return True
                room.remove(unit)
            room.place(int(guest), int(rank))
    return False


def _depth_first(units: Units, order: list[int]) -> tuple[np.ndarray | None, bool]:
    """Returns (placement or None, whether the search was exhaustive). Tries only one of equal ranks."""
    room = Room(units)
    choices: list[list[int]] = []
    for _ in range(SEARCH_STEPS):
        if len(choices) == len(order):
            return room.rank_U, True
        unit = order[len(choices)]
        legal = np.flatnonzero(room.legal_W(unit))
        free = room.free_W[legal]
        empty = ~np.isin(legal, room.rank_U)
        fresh: dict[int, int] = {}
        for rank, room_left, is_empty in zip(legal, free, empty, strict=True):
            # Two empty ranks of equal size lead to the same plans, unless a pin or rival tells them apart.
            key = int(room_left) if is_empty and bool(units.allowed_UW[:, rank].all()) else -1 - int(rank)
            fresh.setdefault(key, int(rank))
        choices.append(sorted(fresh.values(), key=lambda rank: int(room.free_W[rank])))
        while choices and not choices[-1]:
            choices.pop()
            if choices:
                room.remove(order[len(choices) - 1])
        if not choices:
            return None, True
        room.place(order[len(choices) - 1], choices[-1].pop(0))
    return None, False


def _check_each_fits(task: PlacementTask) -> None:
    units = task.units
    for unit in np.argsort(-units.bytes_U, kind="stable"):
        allowed = units.allowed_UW[unit]
        roomiest = int(np.where(allowed, units.capacity_W, -1).argmax())
        short = int(units.bytes_U[unit] - units.capacity_W[roomiest])
        if short > 0:
            names = [task.tables[t].name for t in units.members[unit]]
            what = f"table '{names[0]}' needs" if len(names) == 1 else f"tables {', '.join(names)} together need"
            raise PlanError(
                f"{what} {gib(int(units.bytes_U[unit]))}; the most any rank it may use has is "
                f"{gib(int(units.capacity_W[roomiest]))}, on rank {roomiest} ({gib(short)} short). "
                "Raise autoshard.memory_gib, shrink the table, or use fp16 weights."
            )
    if (short := short_in_all(task)) > 0:
        need, largest = int(units.bytes_U.sum()), max(task.names, key=lambda name: task.table_bytes[name])
        raise PlanError(
            f"{len(task.tables)} tables need {gib(need)} but {len(task.topology.usable_ranks)} ranks have "
            f"{gib(need - short)} in all ({gib(short)} short; the largest table is '{largest}' with "
            f"{gib(task.table_bytes[largest])}). Add ranks, raise autoshard.memory_gib, or shrink tables."
        )


def short_in_all(task: PlacementTask) -> int:
    """Returns the bytes that all usable ranks together lack; 0 or less if they have enough."""
    if task.topology.memory_bytes is None:
        return 0
    return int(task.units.bytes_U.sum() - task.units.capacity_W[list(task.topology.usable_ranks)].sum())


def _nothing_fits(task: PlacementTask, room: Room, unit: int, exhausted: bool) -> PlanError:
    units = task.units
    allowed = units.allowed_UW[unit]
    roomiest = int(np.where(allowed, room.free_W, -1).argmax())
    names = ", ".join(f"'{task.tables[t].name}'" for t in units.members[unit])
    short = int(units.bytes_U[unit] - room.free_W[roomiest])
    why = (
        f"{names} needs {gib(int(units.bytes_U[unit]))}; once the others are placed the most free is "
        f"{gib(int(room.free_W[roomiest]))} on rank {roomiest} ({gib(short)} short)"
        if short > 0
        else f"{names} has no rank left that its pins and 'apart' groups allow (rank {roomiest} has most room)"
    )
    proof = "No placement fits" if exhausted else f"No placement that fits was found in {SEARCH_STEPS:,} search steps"
    return PlanError(f"{proof}: table {why}. Add ranks, raise autoshard.memory_gib, or ease a constraint.")
