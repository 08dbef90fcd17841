"""Plans for a job that runs under another one: better ones, whose moves are worth what they cost.

proposals(costs, makers, task, current, ms_per_byte=1e-9, deadline=None)      # [(plan, ms of a step)], best first
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from dlrm_autoshard.plan import PlanError, ShardingPlan
from dlrm_autoshard.planner.candidates import KICKS, MEDIUM, CandidateMakers
from dlrm_autoshard.planner.learned_costs import LearnedCosts
from dlrm_autoshard.planner.moves.relabel import relabelled
from dlrm_autoshard.planner.result import Candidate
from dlrm_autoshard.planner.search.local_search import late, optima, search
from dlrm_autoshard.planner.search.moving import Moving
from dlrm_autoshard.planner.search.splits import CostsOf, Splitted, fitting, placed_beside, searched, split_search
from dlrm_autoshard.planner.task import PlacementTask

PROPOSALS = 5
"""Plans that are proposed at most."""


def proposals(
    costs: LearnedCosts,
    makers: CandidateMakers,
    task: PlacementTask,
    current: ShardingPlan,
    ms_per_byte: float,
    deadline: float | None,
) -> list[tuple[ShardingPlan, float]]:
    """Returns distinct plans with predicted step costs in ms, best first by that plus the cost of moving: where
    searches end that start from `current`, with its shards and split anew, and `current` itself if legal. ms_per_byte:
    cost of moving, per step.

    Plans from scratch were tried too: with 8 ranks and 200 tables they saved 0.5 to 1.2% more of a step and moved ten
    times the bytes. If moving is free they save 0.3%.
    """
    if task.allows(current):
        as_it_is = task.split_as(current)
        now = as_it_is.cut
        # Where tables may be split, half of the time is left for that. One that no whole plan balances is split first:
        # a search that ends before it comes to splits finds nothing that helps.
        even = _evenly_cut(costs, now)
        near = [] if even is now else _near(costs, even, current, ms_per_byte, _half_way(deadline))
        near = (
            _near(costs, now, current, ms_per_byte, _half_way(deadline) if task.splits.to_balance else deadline) + near
        )
        if task.splits.to_balance:
            start_U = near[0].rank_U
            for way in (
                *split_search(now, costs.costs_of, start_U, deadline),
                *merged(now, costs.costs_of, start_U, deadline),
            ):
                near += _near(costs, way.task, current, ms_per_byte, deadline)[:1]
        found = [Candidate("current+search", one.task.plan_from(one.rank_U), one.step_ms) for one in near]
        costs_now = near[0].costs if now is as_it_is else costs.costs_of(as_it_is)
        found.append(Candidate("current", current, costs_now.step_ms(as_it_is.ranks_from(current))))
    else:
        found = [
            _least_moved(costs, task, c, current) for c in makers.candidates("auto", task, costs.costs_of, deadline)
        ]
    found += [_least_moved(costs, task, away, current) for away in _away_from_hosts(costs, task, deadline)]

    def total_ms(one: Candidate) -> float:
        of_plan = task.split_as(one.plan)
        moving = Moving.of(of_plan, current, ms_per_byte)
        return one.predicted_ms + moving.total_ms(of_plan.placed(one.plan))

    different = {candidate.plan.fingerprint: candidate for candidate in reversed(found)}
    return [(one.plan, one.predicted_ms) for one in sorted(different.values(), key=total_ms)[:PROPOSALS]]


def _half_way(deadline: float | None) -> float | None:
    return None if deadline is None else 0.5 * (time.perf_counter() + deadline)


def _evenly_cut(costs: LearnedCosts, task: PlacementTask) -> PlacementTask:
    """Returns the task with every shard halved, if allowed, that alone takes longer than an even share of all work:
    no placement balances it."""
    while task.splits.allowed:
        ms_U = costs.costs_of(task).alone_ms()
        dominant = np.flatnonzero(ms_U > ms_U.sum() / task.world_size).tolist()
        names = [task.names[member] for unit in dominant for member in task.units.members[unit]]
        halved = next((half for half in map(task.split, names) if half is not None), None)
        if halved is None:
            break
        task = halved
    return task


def _near(
    costs: LearnedCosts, task: PlacementTask, current: ShardingPlan, ms_per_byte: float, deadline: float | None
) -> list[Splitted]:
    """Returns where searches end that start with everything where most of it is now, best first."""
    moving, task_costs = Moving.of(task, current, ms_per_byte), costs.costs_of(task)
    kicks = KICKS if len(task.units) * task.world_size <= MEDIUM else 0
    ended = optima(task, task_costs, moving.home_U, kicks=kicks, seed=costs.seed, deadline=deadline, moving=moving)
    return [Splitted(task, task_costs, rank_U, task_costs.step_ms(rank_U)) for rank_U in ended[:PROPOSALS]]


def _least_moved(costs: LearnedCosts, task: PlacementTask, candidate: Candidate, current: ShardingPlan) -> Candidate:
    """Exchanges the names of equal ranks so that the fewest bytes move from `current`."""
    of_plan = task.split_as(candidate.plan)
    task_costs = costs.costs_of(of_plan)
    rank_U = relabelled(of_plan, task_costs, of_plan.ranks_from(candidate.plan), current)
    return replace(candidate, plan=of_plan.plan_from(rank_U), predicted_ms=task_costs.step_ms(rank_U))


def _away_from_hosts(costs: LearnedCosts, task: PlacementTask, deadline: float | None) -> list[Candidate]:
    """Returns for each host a plan that leaves it empty: single moves do not show what a slow link costs all ranks
    behind it."""
    hosts = task.topology.ranks_by_host
    found = []
    for number, ranks in enumerate(hosts if len(hosts) > 1 else ()):
        if late(deadline):
            break
        excluded = task.topology.excluded | ranks
        try:
            rest = fitting(replace(task, topology=replace(task.topology, excluded=excluded)))
            rank_U = search(rest, costs.costs_of(rest), kicks=0, seed=costs.seed, deadline=deadline)
        except PlanError:  # the others have no room for its tables, or there are no others
            continue
        found.append(Candidate(f"away from host {number}", rest.plan_from(rank_U), 0.0))
    return found


def merged(task: PlacementTask, costs_of: CostsOf, rank_U: np.ndarray, deadline: float | None = None) -> list[Splitted]:
    """Returns for each split table a placement in which it is whole again, except for cuts that constraints need,
    and all else stays."""
    start = Splitted(task, costs_of(task), rank_U, float("inf"))
    found = []
    for table in task.wholes:
        parts, pieces = task.shards_of[table.name], task.constraints.pieces(table)
        if len(parts) > len(pieces) and not late(deadline):
            at = task.names.index(parts[0][0].name)
            whole = task.with_shards([*task.tables[:at], *pieces, *task.tables[at + len(parts) :]])
            child = placed_beside(start, whole, costs_of(whole), deadline)
            found += [] if child is None else [searched(child, deadline)]
    return found
