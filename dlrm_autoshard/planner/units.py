"""Units of placement: tables that must stay together form one unit; constraints become masks.

units = units_of(names, bytes_T, topology, constraints)
room = Room(units)
room.place(0, int(room.legal_W(0).argmax()))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.plan import Constraints, PlanError, Topology
from dlrm_autoshard.tables import Shard

# Axes: T tables, U units, W ranks.

UNLIMITED = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class Units:
    """The units to place. members[u]: table numbers; rivals[u]: units that must not share u's rank."""

    members: tuple[tuple[int, ...], ...]
    unit_of_T: np.ndarray
    bytes_U: np.ndarray
    allowed_UW: np.ndarray
    capacity_W: np.ndarray
    rivals: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.members)

    def sum_over_tables(self, values_TK: np.ndarray) -> np.ndarray:
        """Sums values of tables [T, K] (or [T]) to units [U, K] (or [U])."""
        summed: np.ndarray = np.zeros((len(self), *values_TK.shape[1:]), dtype=values_TK.dtype)
        np.add.at(summed, self.unit_of_T, values_TK)
        return summed


class Room:
    """A partial placement: the free memory of each rank, and where a unit may go."""

    def __init__(self, units: Units, rank_U: np.ndarray | None = None) -> None:
        self.units = units
        self.rank_U = np.full(len(units), -1) if rank_U is None else rank_U.copy()
        placed = self.rank_U >= 0
        self.free_W = units.capacity_W.copy()
        np.subtract.at(self.free_W, self.rank_U[placed], units.bytes_U[placed])

    def legal_W(self, unit: int) -> np.ndarray:
        """Returns a mask [W] of ranks that may take `unit` now."""
        legal: np.ndarray = self.units.allowed_UW[unit] & (self.free_W >= self.units.bytes_U[unit])
        for rival in self.units.rivals[unit]:
            if self.rank_U[rival] >= 0:
                legal[self.rank_U[rival]] = False
        return legal

    def place(self, unit: int, rank: int) -> None:
        self.rank_U[unit] = rank
        self.free_W[rank] -= self.units.bytes_U[unit]

    def remove(self, unit: int) -> int:
        rank = int(self.rank_U[unit])
        self.rank_U[unit] = -1
        self.free_W[rank] += self.units.bytes_U[unit]
        return rank


def units_of(shards: Sequence[Shard], bytes_T: np.ndarray, topology: Topology, constraints: Constraints) -> Units:
    """Groups tables or shards into units. PlanError names a constraint that nothing can meet."""
    numbers = constraints.holders(shards)
    cut = constraints.have_cut(shards)  # else constraints may contradict on an uncut shard, which then fits no rank

    first_T = np.arange(len(shards))  # the first table that each must stay together with
    for group in constraints.together:
        own_T = np.isin(first_T, first_T[[number for name in group for number in numbers[name]]])
        first_T[own_T] = first_T.min(where=own_T, initial=len(shards))
    firsts, unit_of_T = np.unique(first_T, return_inverse=True)
    members: list[list[int]] = [[] for _ in firsts]
    for table, unit in enumerate(unit_of_T):
        members[unit].append(table)

    allowed_UW = np.ones((len(members), topology.world_size), dtype=bool)
    allowed_UW[:, sorted(topology.excluded)] = False
    for name, rank in constraints.pinned.items():
        if not 0 <= rank < topology.world_size:
            raise PlanError(f"table '{name}' is pinned to rank {rank}, but there are {topology.world_size} ranks.")
        if rank in topology.excluded:
            raise PlanError(f"table '{name}' is pinned to rank {rank}, which is excluded.")
        for number in numbers[name]:
            row = allowed_UW[unit_of_T[number]]
            row[np.arange(topology.world_size) != rank] = False
            if cut and not row.any():
                raise PlanError(
                    f"table '{name}' is pinned to rank {rank}, but must stay together with one pinned elsewhere."
                )

    rivals: list[set[int]] = [set() for _ in members]
    for group in constraints.apart:
        of_tables = [{int(unit_of_T[number]) for number in numbers[name]} for name in group]
        twice = [unit for unit in set().union(*of_tables) if sum(unit in own for own in of_tables) > 1]
        allowed_UW[twice] = False
        if cut and twice:
            raise PlanError(f"tables {', '.join(group)} must stay apart, but two of them must also stay together.")
        if len(group) > len(topology.usable_ranks):
            raise PlanError(
                f"{len(group)} tables must stay apart, but only {len(topology.usable_ranks)} ranks can own tables."
            )
        for own in of_tables:
            for unit in own:
                rivals[unit].update(set().union(*of_tables) - own)

    bytes_U = np.zeros(len(members), dtype=np.int64)
    np.add.at(bytes_U, unit_of_T, bytes_T)
    capacity = topology.memory_bytes
    return Units(
        members=tuple(tuple(unit) for unit in members),
        unit_of_T=unit_of_T,
        bytes_U=bytes_U,
        allowed_UW=allowed_UW,
        capacity_W=np.full(topology.world_size, UNLIMITED) if capacity is None else np.array(capacity, dtype=np.int64),
        rivals=tuple(tuple(sorted(units)) for units in rivals),
    )
