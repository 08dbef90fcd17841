"""Estimates what measuring tables before the first plan would save.

worth_ms = worth_measuring(planner, task, budget_seconds=0.5)
"""

from __future__ import annotations

from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.search.local_search import deadline_in, late
from dlrm_autoshard.planner.search.splits import Splitted, costly_shards, placed_beside, searched
from dlrm_autoshard.planner.task import PlacementTask


def worth_measuring(planner: Planner, task: PlacementTask, *, budget_seconds: float | None = None) -> float:
    """Returns the mean ms of a step that choosing among candidates would save if all tables were measured.

    Includes halves of tables that slow ranks down, if they may be split: the cost of an unmeasured width is a guess,
    with which no search finds that a split pays."""
    deadline, costs = deadline_in(budget_seconds), planner.costs
    candidates = planner.makers.candidates("auto", task, costs.costs_of, deadline)
    plans, names = [candidate.plan for candidate in candidates], list(task.names)
    if task.splits.allowed:
        best_plan = min(candidates, key=lambda candidate: candidate.predicted_ms).plan
        now = task.split_as(best_plan)
        start = Splitted(now, costs.costs_of(now), now.ranks_from(best_plan), 0.0)
        for name in costly_shards(start):
            halved = None if late(deadline) else now.split(name)
            child = None if halved is None else placed_beside(start, halved, costs.costs_of(halved), deadline)
            if child is not None:
                plans.append(child.task.plan_from(searched(child, deadline).rank_U))
                names += [half for half in child.task.names if half not in now.names][:1]
    estimated = costs.estimates(task, plans, alone=names)
    return estimated.worth_knowing() * float(estimated.step_ms.min())
