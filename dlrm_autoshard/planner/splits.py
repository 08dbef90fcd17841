"""Which tables to split by columns, and where the parts go: a beam over halvings (NeuroShard, MLSys 2023).

task = fitting(task)                            # tables that fit no rank whole are split until a plan exists
found = split_search(task, costs_of, rank_U)    # Splitted(task of shards, placement, ms), best first
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.plan import PlanError
from dlrm_autoshard.planner.feasible import feasible
from dlrm_autoshard.planner.greedy_on_cost import greedy_on_cost
from dlrm_autoshard.planner.search import improve
from dlrm_autoshard.planner.task import PlacementTask, Room
from dlrm_autoshard.planner.task_costs import TaskCosts

BEAM, MOST_HALVINGS = 3, 10
LEAST_GAIN = 0.003
"""Part of a step that one halving more must save."""
MOST_SWAPS = 256
"""Tried in a round of a node's local search: there are dozens of nodes, and the winner is searched thoroughly."""
THOROUGH_KICKS = 5
CostsOf = Callable[[PlacementTask], TaskCosts]


@dataclass(frozen=True)
class Splitted:
    """A way to split, with a placement of the shards and what it is predicted to cost."""

    task: PlacementTask
    rank_U: np.ndarray
    step_ms: float


def fitting(task: PlacementTask) -> PlacementTask:
    """The task itself where a legal plan exists, or tables may not be split; else with its largest tables split until
    one does. PlanError, of the task as it was asked, where splitting brings none."""
    if task.topology.memory_bytes is None or task.splits.max_parts <= 1 or not task.splits.allowed:
        return task
    refusal: PlanError | None = None
    split = task
    for _ in range(MOST_HALVINGS * task.world_size):
        try:
            feasible(split)
            return split
        except PlanError as error:
            refusal = refusal or error
        by_bytes = sorted(split.names, key=lambda name: -split.table_bytes[name])
        halved = next((half for name in by_bytes if (half := split.split(name)) is not None), None)
        if halved is None:
            break
        split = halved
    assert refusal is not None
    raise refusal


def split_search(
    task: PlacementTask, costs_of: CostsOf, rank_U: np.ndarray, deadline: float | None = None
) -> list[Splitted]:
    """Ways to split that beat the task as it is under the placement `rank_U`, best first; none where none does.

    Each round halves, of every node in the beam, the shards that make ranks slow: of each stage's slowest rank the one
    that is dearest in it. The parts go where they cost least and local search improves the placement; where that leaves
    a rank slow, everything is placed anew.
    """
    start = Splitted(task, rank_U, costs_of(task).step_ms(rank_U))
    beam, best, seen = [start], start, set[frozenset[str]]()
    for _ in range(MOST_HALVINGS if task.splits.max_parts > 1 else 0):
        children = []
        for node in beam:
            for name in _dear(node, costs_of(node.task)):
                halved = node.task.split(name)
                if halved is None or frozenset(halved.names) in seen or _late(deadline):
                    continue
                seen.add(frozenset(halved.names))
                placed = _placed(node, halved, costs_of(halved), deadline)
                if placed is not None:
                    children.append(placed)
        beam = sorted(children, key=lambda child: child.step_ms)[:BEAM]
        if not beam or beam[0].step_ms > best.step_ms * (1 - LEAST_GAIN):
            break
        best = beam[0]
    if best is start:
        return []
    costs = costs_of(best.task)
    better_U = improve(best.task, costs, best.rank_U, kicks=THOROUGH_KICKS, deadline=deadline)
    return [Splitted(best.task, better_U, costs.step_ms(better_U))]


def _dear(node: Splitted, costs: TaskCosts) -> Iterator[str]:
    """Of each stage's slowest rank, the shard that is dearest in this stage and may be halved."""
    task, world_size = node.task, node.task.world_size
    ms_W4 = costs.stage_ms(costs.sums(node.rank_U), np.arange(world_size))
    rank_T = node.rank_U[task.units.unit_of_T]
    named = set()
    for stage, rank in enumerate(ms_W4.argmax(axis=0)):
        own = np.flatnonzero(rank_T == rank)
        ms_N = costs.stage_ms(costs.summary_TK[own], np.full(len(own), rank))[:, stage]
        for table in own[np.argsort(-ms_N, kind="stable")]:
            if task.halves(task.names[table]) is not None:
                named.add(task.names[table])
                break
    yield from sorted(named)


def _placed(node: Splitted, halved: PlacementTask, costs: TaskCosts, deadline: float | None) -> Splitted | None:
    """What is new in `halved` placed beside all that stays as it is in `node`, then local search."""
    rank_of = dict(zip(node.task.names, node.rank_U[node.task.units.unit_of_T], strict=True))
    rank_U = np.array([rank_of.get(halved.names[members[0]], -1) for members in halved.units.members])
    room = Room(halved.units, rank_U)
    for unit in np.flatnonzero(rank_U < 0):
        legal = np.flatnonzero(room.legal_W(int(unit)))
        if len(legal) == 0:
            return None
        ms_N = []
        for rank in legal:
            room.rank_U[unit] = rank
            ms_N.append(costs.stage_ms(costs.sums(room.rank_U), np.arange(halved.world_size)).max(axis=0).sum())
        room.rank_U[unit] = -1
        room.place(int(unit), int(legal[int(np.argmin(ms_N))]))
    found = [improve(halved, costs, room.rank_U, deadline=deadline, most_swaps=MOST_SWAPS)]
    if costs.step_ms(found[0]) > node.step_ms * (1 - LEAST_GAIN):
        found.append(improve(halved, costs, greedy_on_cost(halved, costs), deadline=deadline, most_swaps=MOST_SWAPS))
    return min((Splitted(halved, rank_U, costs.step_ms(rank_U)) for rank_U in found), key=lambda one: one.step_ms)


def merged(task: PlacementTask, costs_of: CostsOf, rank_U: np.ndarray, deadline: float | None = None) -> list[Splitted]:
    """For each split table, a placement in which it is whole again, and all else begins where it is."""
    start = Splitted(task, rank_U, float("inf"))
    found = []
    for table in task.wholes:
        parts = [part for part in task.tables if part.name != table.name and part.name.startswith(f"{table.name}[")]
        if parts and not _late(deadline):
            at = task.tables.index(parts[0])
            whole = task.with_shards([*task.tables[:at], table, *task.tables[at + len(parts) :]])
            placed = _placed(start, whole, costs_of(whole), deadline)
            found += [] if placed is None else [placed]
    return found


def _late(deadline: float | None) -> bool:
    return deadline is not None and time.perf_counter() > deadline
