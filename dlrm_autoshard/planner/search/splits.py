"""Which tables to split, and where the parts go: a beam over halvings (NeuroShard, MLSys 2023).

task = fitting(task)                            # tables that fit no rank whole are split until a plan exists
found = split_search(task, costs_of, rank_U)    # Splitted(task of shards, placement, ms), best first
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from dlrm_autoshard.plan import PlanError
from dlrm_autoshard.planner.feasible import feasible, short_in_all
from dlrm_autoshard.planner.search.greedy_on_cost import greedy_on_cost
from dlrm_autoshard.planner.search.local_search import improve, late
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts
from dlrm_autoshard.planner.units import Room
from dlrm_autoshard.tables import Shard

BEAM, MOST_HALVINGS = 3, 10
"""With a beam of 2 and 4 moves a child, 20 x 8 and 50 x 8 end at the same costs in five sixths of the time, but
200 x 64 at up to 20% higher ones and 1,000 x 128 at 13% higher ones."""
LEAST_GAIN = 0.003
"""Part of a step that one halving more must save."""
PATIENCE = 1
"""Halvings in a row that may save less: two equal parts, or two stages' slowest ranks, are relieved one by one."""
FEW_MOVES = 10
"""Moves in a child's local search: there are dozens, and only the likeliest are searched thoroughly."""
RECEIVING = 2
"""Among the stages that searches see."""
THOROUGH_KICKS, HINT_HALVINGS = 5, 40
CostsOf = Callable[[PlacementTask], TaskCosts]


@dataclass(frozen=True)
class Splitted:
    """A way to split, with a placement of the shards and what it is predicted to cost."""

    task: PlacementTask
    costs: TaskCosts
    rank_U: np.ndarray
    step_ms: float


def fitting(task: PlacementTask) -> PlacementTask:
    """The task, cut as it asks, where a legal plan exists, else with its largest tables split until one does.
    PlanError, of the task as it was asked, where splits as allowed bring none: with what to set for some that would."""
    asked, task = task.splits, task.cut
    if task.topology.memory_bytes is None:
        return task
    try:
        feasible(task)
        return task
    except PlanError as error:
        refusal = error
    if short_in_all(task) > 0:
        raise refusal
    if asked.allowed and (split := _halved_to_fit(task)) is not None:
        return split
    if asked.rows and (split := _halved_to_fit(task, rows=True)) is not None:
        return split
    for splits in (replace(asked, allowed=True), replace(asked, allowed=True, max_parts=2**16, min_dim=4)):
        split = None if splits == asked else _halved_to_fit(replace(task, splits=splits), most=HINT_HALVINGS)
        if split is not None:
            set_so = asked.settings_for(split.tables)
            raise PlanError(f"{refusal} Split by columns, the tables would fit: set {set_so}.")
    raise PlanError(f"{refusal} Splitting tables by columns{' and by rows' * asked.rows} was tried, too.")


def _halved_to_fit(task: PlacementTask, *, rows: bool = False, most: int | None = None) -> PlacementTask | None:
    """With its largest shards halved, by columns or by rows, until a legal plan exists; None where none is found.
    Halves take no less."""
    for _ in range(most or MOST_HALVINGS * task.world_size):
        by_bytes = sorted(task.names, key=lambda name: -task.table_bytes[name])
        ways = (task.split_by_rows(name) if rows else task.split(name) for name in by_bytes)
        halved = next((half for half in ways if half is not None), None)
        if halved is None or short_in_all(halved) > 0:
            return None
        try:
            feasible(halved)
            return halved
        except PlanError:
            task = halved
    return None


def split_search(
    task: PlacementTask, costs_of: CostsOf, rank_U: np.ndarray, deadline: float | None = None
) -> list[Splitted]:
    """Ways to split that beat the task as it is under the placement `rank_U`, best first; none where none does.

    Each round halves, of every node in the beam, the shards that make ranks slow: of each stage's slowest rank the one
    that is dearest in it, alone or with all parts of its table that are as wide. The parts go where they cost least,
    and a few moves tell which children are worth a local search; where it gains little, the best gets a placement anew.
    """
    costs = costs_of(task)
    start = Splitted(task, costs, rank_U, costs.step_ms(rank_U))
    beam, best, seen, in_vain = [start], start, set[frozenset[str]](), 0
    for _ in range(MOST_HALVINGS if task.splits.max_parts > 1 else 0):
        children = []
        for node in beam:
            for name in dear_shards(node):
                for halved in _halvings(node.task, name):
                    if frozenset(halved.names) in seen or late(deadline):
                        continue
                    seen.add(frozenset(halved.names))
                    child = _placed(node, halved, costs_of(halved), deadline)
                    if child is not None:
                        children.append(child)
        likeliest = sorted(children, key=lambda child: child.step_ms)[:BEAM]
        beam = sorted((_searched(child, deadline) for child in likeliest), key=lambda child: child.step_ms)
        if beam and beam[0].step_ms >= best.step_ms * (1 - LEAST_GAIN):
            beam[0] = _searched_anew(beam[0], deadline)
        if beam and beam[0].step_ms < best.step_ms * (1 - LEAST_GAIN):
            best, in_vain = beam[0], 0
            continue
        in_vain += 1
        if not beam or in_vain > PATIENCE:
            break
    if best is start:
        return []
    better_U = improve(best.task, best.costs, best.rank_U, kicks=THOROUGH_KICKS, deadline=deadline)
    return [replace(best, rank_U=better_U, step_ms=best.costs.step_ms(better_U))]


def _halvings(task: PlacementTask, name: str) -> Iterator[PlacementTask]:
    """The shard `name` halved; and so all parts of its table that are as wide."""
    if (halved := task.split(name)) is not None:
        yield halved
    width = task.shard(name)[0].embedding_dim
    parts = task.shards_of[Shard.parse(name).table]
    alike = [part.name for part, _ in parts if part.embedding_dim == width]
    all_halved: PlacementTask | None = task if len(alike) > 1 else None
    for part in alike:
        all_halved = None if all_halved is None else all_halved.split(part)
    if all_halved is not None:
        yield all_halved


def dear_shards(node: Splitted) -> Iterator[str]:
    """Returns for each stage the shard of the slowest rank that is costliest in this stage and may be halved."""
    task, costs, world_size = node.task, node.costs, node.task.world_size
    ms_W4 = costs.stage_ms(costs.sums(node.rank_U), np.arange(world_size))
    rank_T = node.rank_U[task.units.unit_of_T]
    named = set()
    for stage, rank in enumerate(ms_W4.argmax(axis=0)):
        if stage == RECEIVING:  # the rank with fewest dims: more of them relieve it
            continue
        own = np.flatnonzero(rank_T == rank)
        ms_N = costs.stage_ms(costs.summary_TK[own], np.full(len(own), rank))[:, stage]
        for table in own[np.argsort(-ms_N, kind="stable")]:
            if task.halves(task.names[table]) is not None:
                named.add(task.names[table])
                break
    yield from sorted(named)


def with_halves(node: Splitted, name: str, costs_of: CostsOf, deadline: float | None) -> Splitted | None:
    """The node with this shard halved, whatever that is predicted to cost; None where that may not be."""
    halved = None if late(deadline) else node.task.split(name)
    child = None if halved is None else _placed(node, halved, costs_of(halved), deadline)
    return None if child is None else _searched(child, deadline)


def _placed(node: Splitted, halved: PlacementTask, costs: TaskCosts, deadline: float | None) -> Splitted | None:
    """Places the new parts of `halved` beside what stays in `node`, with a few moves; None where nothing is legal."""
    rank_of = dict(zip(node.task.names, node.rank_U[node.task.units.unit_of_T], strict=True))
    rank_U = np.array([rank_of.get(halved.names[members[0]], -1) for members in halved.units.members])
    room, sums_WK = Room(halved.units, rank_U), costs.sums(rank_U)
    ms_W4 = costs.stage_ms(sums_WK, np.arange(halved.world_size))
    for unit in np.flatnonzero(rank_U < 0).tolist():
        legal = np.flatnonzero(room.legal_W(unit))
        if len(legal) == 0:
            return None
        after_NW4, after_NWK = (np.repeat(now[None], len(legal), axis=0) for now in (ms_W4, sums_WK))
        number_N = np.arange(len(legal))
        after_NWK[number_N, legal] += costs.summary_UK[unit]
        after_NW4[number_N, legal] = costs.stage_ms(after_NWK[number_N, legal], legal)
        best = int(costs.total_ms(after_NW4, after_NWK).argmin())
        room.place(unit, int(legal[best]))
        sums_WK, ms_W4 = after_NWK[best], after_NW4[best]
    rank_U = improve(halved, costs, room.rank_U, deadline=deadline, most_moves=FEW_MOVES)
    return Splitted(halved, costs, rank_U, costs.step_ms(rank_U))


def _searched(child: Splitted, deadline: float | None) -> Splitted:
    """Local search from its placement."""
    best_U = improve(child.task, child.costs, child.rank_U, deadline=deadline)
    return replace(child, rank_U=best_U, step_ms=child.costs.step_ms(best_U))


def _searched_anew(child: Splitted, deadline: float | None) -> Splitted:
    """Itself, or what local search makes of a placement made anew, where that is better."""
    anew = _searched(replace(child, rank_U=greedy_on_cost(child.task, child.costs)), deadline)
    return min(child, anew, key=lambda one: one.step_ms)


def merged(task: PlacementTask, costs_of: CostsOf, rank_U: np.ndarray, deadline: float | None = None) -> list[Splitted]:
    """For each split table, a placement in which it is whole again, but for cuts that constraints ask for, and all else
    begins where it is."""
    start = Splitted(task, costs_of(task), rank_U, float("inf"))
    found = []
    for table in task.wholes:
        parts, pieces = task.shards_of[table.name], task.constraints.pieces(table)
        if len(parts) > len(pieces) and not late(deadline):
            at = task.names.index(parts[0][0].name)
            whole = task.with_shards([*task.tables[:at], *pieces, *task.tables[at + len(parts) :]])
            child = _placed(start, whole, costs_of(whole), deadline)
            found += [] if child is None else [_searched(child, deadline)]
    return found
