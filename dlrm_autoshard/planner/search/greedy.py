"""The heuristics of the literature: one greedy, five keys, and a random placement; all obey memory and constraints.

    rank_U = greedy(task, "lookup_greedy")

Largest key first, each to the rank whose load would be least after taking it. Where the order by key runs into a dead
end, it is tried again largest bytes first; where that fails too, any feasible plan is taken and evened out by moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dlrm_autoshard.planner.feasible import feasible, make_room
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.units import Room
from dlrm_autoshard.tables import TableConfig, TableStats, lookup_work

KEYS: dict[str, Callable[[TableConfig, TableStats], float]] = {
    "size_greedy": lambda t, s: float(t.num_embeddings * t.embedding_dim),
    "dim_greedy": lambda t, s: float(t.embedding_dim),
    "lookup_greedy": lambda t, s: lookup_work(t.embedding_dim, s.mean_pooling),
    "size_lookup_greedy": lambda t, s: (
        lookup_work(t.embedding_dim, s.mean_pooling) * math.log10(max(t.num_embeddings, 2))
    ),
}
HEURISTICS = (*KEYS, "random")


def heuristic(task: PlacementTask, name: str, generator: np.random.Generator) -> np.ndarray:
    """Places a task by a heuristic's name, or at random."""
    return random_placement(task, generator) if name == "random" else greedy(task, name)


def greedy(task: PlacementTask, name: str) -> np.ndarray:
    """Returns a rank per unit by the heuristic `name`, a key of KEYS."""
    key_T = np.array([KEYS[name](table, stats) for table, stats in zip(task.tables, task.stats, strict=True)])
    return balance(task, task.units.sum_over_tables(key_T))


def balance(task: PlacementTask, key_U: np.ndarray) -> np.ndarray:
    """Spreads `key_U` over ranks as evenly as longest-first greedy does; slow ranks get less."""
    slowness_W = 1.0 / np.array(task.topology.speed or [1.0] * task.world_size)
    by_key = np.argsort(-key_U, kind="stable")
    by_bytes = np.argsort(-task.units.bytes_U, kind="stable")
    for order in (by_key, by_bytes):
        rank_U = _greedy_pass(task, order, key_U, slowness_W)
        if rank_U is not None:
            return rank_U
    return _even_out(task, feasible(task), key_U, slowness_W)


def random_placement(task: PlacementTask, generator: np.random.Generator) -> np.ndarray:
    """Places units in random order on random legal ranks."""
    room = Room(task.units)
    for unit in generator.permutation(len(task.units)):
        legal = np.flatnonzero(room.legal_W(int(unit)))
        if len(legal):
            room.place(int(unit), int(generator.choice(legal)))
        elif not make_room(room, int(unit)):
            return feasible(task)
    return room.rank_U


def _greedy_pass(
    task: PlacementTask, order: np.ndarray, key_U: np.ndarray, slowness_W: np.ndarray
) -> np.ndarray | None:
    room = Room(task.units)
    load_W = np.zeros(task.world_size)
    for unit in order:
        legal = room.legal_W(int(unit))
        if not legal.any():
            return None
        rank = int(np.where(legal, (load_W + key_U[unit]) * slowness_W, np.inf).argmin())
        room.place(int(unit), rank)
        load_W[rank] += key_U[unit]
    return room.rank_U


def _even_out(task: PlacementTask, rank_U: np.ndarray, key_U: np.ndarray, slowness_W: np.ndarray) -> np.ndarray:
    """Moves units off the most loaded rank while the larger of the two loads falls."""
    room = Room(task.units, rank_U)
    load_W = np.bincount(rank_U, weights=key_U, minlength=task.world_size)
    for _ in range(4 * len(key_U)):
        source = int((load_W * slowness_W).argmax())
        best: tuple[float, int, int] | None = None
        for unit in np.flatnonzero(room.rank_U == source):
            legal = room.legal_W(int(unit))
            legal[source] = False
            if legal.any():
                after_W = np.where(legal, (load_W + key_U[unit]) * slowness_W, np.inf)
                rank = int(after_W.argmin())
                if best is None or after_W[rank] < best[0]:
                    best = (float(after_W[rank]), int(unit), rank)
        if best is None or best[0] >= load_W[source] * slowness_W[source]:
            break
        _, moved, target = best
        room.remove(moved)
        room.place(moved, target)
        load_W[source] -= key_U[moved]
        load_W[target] += key_U[moved]
    return room.rank_U
