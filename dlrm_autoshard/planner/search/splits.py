"""Which tables to split, and where the parts go: from the fewest cuts that balance ranks, a search over others.

task = fitting(task)                            # tables that fit no rank whole are split until a plan exists
found = split_search(task, costs_of, rank_U)    # Splitted(task of shards, placement, ms), best first
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from dlrm_autoshard.plan import PlanError
from dlrm_autoshard.plan.cuts import by_rows
from dlrm_autoshard.planner.feasible import feasible, short_in_all
from dlrm_autoshard.planner.search.greedy_on_cost import greedy_on_cost
from dlrm_autoshard.planner.search.local_search import improve, late
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts
from dlrm_autoshard.planner.units import Room
from dlrm_autoshard.tables import Shard, TableConfig

BEAM, MOST_HALVINGS = 2, 10
LEAST_GAIN = 0.003
"""Part of a step that other cuts must save."""
PATIENCE = 2
"""Times in a row that more cuts may leave a costlier step, before no more are tried."""
FEW_MOVES = 5
"""Moves in a way's first local search: there are dozens, and only the likeliest are searched thoroughly."""
RECEIVING = 2
"""Among the stages that searches see."""
THOROUGH_KICKS, HINT_HALVINGS = 5, 40
SMALL_PART, CHEAPER = 0.25, 0.95
"""Part of a rank's even share of all costs that needs no cut. Part of its cost that a cut must bring the costliest part
below: on a GPU 16 columns take as long as 32."""
ROWS_SURE = 0.05
"""Part of a step that splits by rows must save over others: they change the order in which a bag is summed."""
CostsOf = Callable[[PlacementTask], TaskCosts]


@dataclass(frozen=True)
class Splitted:
    """A way to split, a placement of its shards, and the predicted step."""

    task: PlacementTask
    costs: TaskCosts
    rank_U: np.ndarray
    step_ms: float


def fitting(task: PlacementTask) -> PlacementTask:
    """Returns the task, cut as its constraints need, if a legal plan exists, else with its largest tables split
    until one does. PlanError if allowed splits find none, with settings that would."""
    asked, task = task.splits, task.cut
    if task.topology.memory_bytes is None:
        return task
    try:
        feasible(task)
        return task
    except PlanError as error:
        reason = error
    if short_in_all(task) > 0:
        raise reason
    for rows, may in ((False, asked.allowed), (True, asked.rows)):
        if may and (split := _halved_to_fit(task, rows=rows)) is not None:
            return split
    for splits in (replace(asked, allowed=True), replace(asked, allowed=True, max_parts=2**16, min_dim=4)):
        other = replace(task, splits=splits)
        if splits != asked and (split := _halved_to_fit(other, most=HINT_HALVINGS)) is not None:
            raise PlanError(f"{reason} Split by columns, the tables would fit: set {asked.settings_for(split.tables)}.")
    raise PlanError(f"{reason} Splitting tables by columns{' and by rows' * asked.rows} was tried, too.")


def _halved_to_fit(task: PlacementTask, *, rows: bool = False, most: int | None = None) -> PlacementTask | None:
    """Halves the largest shards, by columns or by rows, until a legal plan exists; returns None if none is found."""
    for _ in range(most or MOST_HALVINGS * task.world_size):
        by_bytes = sorted(task.names, key=lambda name: -task.table_bytes[name])
        halved = next((half for name in by_bytes if (half := task.split(name, rows=rows)) is not None), None)
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
    """Returns ways to split that beat the unsplit task under the placement `rank_U`, best first.

    It first cuts tables as seldom as leaves no shard too costly, then cuts those that make ranks slow in other ways.
    Shards go where they cost least, and a few moves tell which ways are worth a local search; if that gains little, the
    best is placed anew. Splits by rows must save `ROWS_SURE` more.
    """
    costs = costs_of(task)
    start = best = Splitted(task, costs, rank_U, costs.step_ms(rank_U))
    before, seen = {piece.whole.name for piece in task.pieces if by_rows(piece.parts)}, {frozenset(task.names)}

    def asked_ms(one: Splitted) -> float:
        ranged = any(by_rows(piece.parts) and piece.whole.name not in before for piece in one.task.pieces)
        return one.step_ms * (1 + ROWS_SURE * ranged)

    def placed(ways: Iterable[PlacementTask], node: Splitted, patience: float = math.inf) -> Iterator[Splitted]:
        """Yields the ways, placed; stops after so many in a row cost more than one before."""
        least_ms, in_vain = math.inf, 0
        for way in ways:
            if in_vain >= patience or late(deadline):
                return
            if frozenset(way.names) not in seen:
                seen.add(frozenset(way.names))
                if (child := placed_beside(node, way, costs_of(way), deadline)) is not None:
                    in_vain = 0 if asked_ms(child) < least_ms else in_vain + 1
                    least_ms = min(least_ms, asked_ms(child))
                    yield child

    kinds = [fewest_cuts(task, costs_of, rows=rows) for rows in {False, task.splits.rows_to_balance}]
    nodes = [node for ways in kinds for node in placed(ways, start, PATIENCE)]
    while nodes:
        likeliest = sorted(nodes, key=asked_ms)[:BEAM]
        beam = sorted((searched(node, deadline) for node in likeliest), key=asked_ms)
        if asked_ms(beam[0]) >= asked_ms(best) * (1 - LEAST_GAIN):
            beam[0] = _searched_anew(beam[0], deadline)
        if asked_ms(beam[0]) >= asked_ms(best) * (1 - LEAST_GAIN):
            break
        best, nodes = beam[0], [*placed(_other_cuts(beam[0]), beam[0])]
    if best is start:
        return []
    better_U = improve(best.task, best.costs, best.rank_U, kicks=THOROUGH_KICKS, deadline=deadline)
    return [replace(best, rank_U=better_U, step_ms=best.costs.step_ms(better_U))]


def fewest_cuts(task: PlacementTask, costs_of: CostsOf, *, rows: bool) -> Iterator[PlacementTask]:
    """Yields the task with its costliest shard cut once more, then two, three and ever more shards at once, until
    shards are small or cuts do not make them cheaper. rows: cut by rows where that is surely cheaper than by
    columns."""

    def alone_ms(parts: Iterable[TableConfig]) -> dict[TableConfig, float]:
        alone = task.unconstrained.with_shards(list(dict.fromkeys(parts)))
        return dict(zip(alone.tables, costs_of(alone).alone_ms().tolist(), strict=True))

    def most_ms(parts: Sequence[TableConfig]) -> float:
        return max(ms_of[part] for part in parts)

    whole, splits, ms_of = task, task.splits, alone_ms(task.tables)
    small_ms = SMALL_PART * sum(ms_of.values()) / task.world_size
    now = {piece: piece.parts for piece in task.pieces if most_ms(piece.parts) > small_ms}
    ways = {piece: list(piece.ways(splits, rows=rows)) for piece in now}
    ms_of |= alone_ms([*whole.tables, *(part for of in ways.values() for parts in of for part in parts)])
    cuts = told = 0
    while now:
        piece = max(now, key=lambda piece: most_ms(now[piece]))
        ms, more = most_ms(now[piece]), [parts for parts in ways[piece] if len(parts) > len(now[piece])]
        cheaper = [parts for parts in more if most_ms(parts) < CHEAPER * ms]
        if ms <= small_ms or not cheaper:
            del now[piece]
            continue
        now[piece] = min(cheaper, key=lambda parts: (len(parts), most_ms(parts) * (1 + ROWS_SURE * by_rows(parts))))
        task, cuts = task.with_shards(piece.replaced(task.tables, now[piece])), cuts + 1
        if 3 * cuts >= 4 * told:
            told = cuts
            yield task


def _other_cuts(node: Splitted) -> Iterator[PlacementTask]:
    """Yields the task with each table that makes a rank slow cut in other ways."""
    task, piece_of = node.task, {part.name: piece for piece in node.task.pieces for part in piece.parts}

    def others(task: PlacementTask, name: Shard) -> list[tuple[TableConfig, ...]]:
        return list(piece_of[name].other_ways(task.splits)) if name in piece_of else []

    for name in costly_shards(node, others):
        for parts in others(task, name):
            yield task.with_shards(piece_of[name].replaced(task.tables, parts))


def costly_shards(
    node: Splitted, may_cut: Callable[[PlacementTask, Shard], object] = PlacementTask.halves
) -> Iterator[Shard]:
    """Yields for each stage the slowest rank's costliest shard that may be cut (by default: halved)."""
    task, costs, world_size = node.task, node.costs, node.task.world_size
    ms_W4 = costs.stage_ms(costs.sums(node.rank_U), np.arange(world_size))
    rank_T = node.rank_U[task.units.unit_of_T]
    named = set[Shard]()
    for stage, rank in enumerate(ms_W4.argmax(axis=0)):
        if stage == RECEIVING:  # the rank with fewest dims: more of them relieve it
            continue
        own = np.flatnonzero(rank_T == rank)
        ms_N = costs.stage_ms(costs.summary_TK[own], np.full(len(own), rank))[:, stage]
        costliest = (task.names[table] for table in own[np.argsort(-ms_N, kind="stable")])
        named.update(islice((name for name in costliest if may_cut(task, name)), 1))
    yield from sorted(named)


def placed_beside(node: Splitted, halved: PlacementTask, costs: TaskCosts, deadline: float | None) -> Splitted | None:
    """Places the new shards of `halved` beside those of `node`, with a few moves; returns None if nothing is legal."""
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


def searched(child: Splitted, deadline: float | None) -> Splitted:
    """Runs local search from the node's placement."""
    best_U = improve(child.task, child.costs, child.rank_U, deadline=deadline)
    return replace(child, rank_U=best_U, step_ms=child.costs.step_ms(best_U))


def _searched_anew(child: Splitted, deadline: float | None) -> Splitted:
    """Returns the better of the node and local search from a fresh placement."""
    anew = searched(replace(child, rank_U=greedy_on_cost(child.task, child.costs)), deadline)
    return min(child, anew, key=lambda one: one.step_ms)
