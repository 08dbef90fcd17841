"""Which plans to measure, and what to expect of them afterwards: `auto`'s contest where plans can be measured.

candidates = measure_finalists(costs, task, candidates, measure, measure_plans=3)
best(candidates)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dlrm_autoshard.costs import StepProfile, step_cost_ms
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.candidates import KICKS, MEDIUM
from dlrm_autoshard.planner.estimates import Estimates
from dlrm_autoshard.planner.greedy import KEYS
from dlrm_autoshard.planner.learned_costs import LearnedCosts
from dlrm_autoshard.planner.result import Candidate
from dlrm_autoshard.planner.search import improve, late, search
from dlrm_autoshard.planner.splits import Splitted, fitting, split_search
from dlrm_autoshard.planner.task import PlacementTask

WORTH_MEASURING = 0.001
"""Part of a step. What measuring must be expected to save, in a job of any length."""
STEPS_MEASURED = 10
"""That measuring a plan takes as long as, until one was measured: two rounds of four or five."""
Measure = Callable[[Sequence[ShardingPlan]], list[StepProfile]]


def measure_finalists(
    costs: LearnedCosts,
    task: PlacementTask,
    candidates: Sequence[Candidate],
    measure: Measure,
    measure_plans: int,
    deadline: float | None = None,
    steps: int | None = None,
) -> list[Candidate]:
    """All candidates and those found on the way, with what was measured and what is expected of each.

    The plan with the least predicted cost and the best heuristic are measured first. What that says about the tables
    corrects the predictions; the search goes on with these, and what it finds is measured too: and so on, until
    `measure_plans` are, or nothing better is in sight. Every candidate gets `expected_ms`, the best estimate from all
    of it, and the least one that was measured wins: the best heuristic is among them, so the winner is never expected
    to be worse. steps: for which the plan is to serve. Where knowing the plans' costs would save less time in them, on
    average, than measuring takes, none is measured.
    """
    profiles: dict[str, StepProfile] = {}

    def pays(estimated: Estimates, seconds: float) -> bool:
        served_seconds = math.inf if steps is None else steps * float(estimated.step_ms.min()) / 1000
        return estimated.worth_knowing > max(WORTH_MEASURING, seconds / served_seconds)

    def measured(plans: Sequence[ShardingPlan]) -> float:
        started = time.perf_counter()
        for profile in measure(plans):
            profiles[profile.plan.fingerprint] = profile
            costs.observe(profile, task.topology)
        return (time.perf_counter() - started) / len(plans)

    ranked = sorted(candidates, key=lambda candidate: candidate.predicted_ms)
    first = {c.plan.fingerprint: c.plan for c in (ranked[0], next(c for c in ranked if c.name in KEYS), *ranked)}
    finalists = list(first.values())[: min(2, measure_plans)]
    found, seconds = list(candidates), STEPS_MEASURED * ranked[0].predicted_ms / 1000
    if steps is None or pays(costs.estimates(task, list(first.values())), len(finalists) * seconds):
        seconds = measured(finalists)
    kicks = KICKS if len(task.units) * task.world_size <= MEDIUM else 0
    base = fitting(task)
    while profiles and len(profiles) < measure_plans and not late(deadline, seconds):
        plans = [profile.plan for profile in profiles.values()]
        leading = plans[int(costs.estimates(task, plans).step_ms.argmin())]
        now = task.split_as(leading)
        now_costs, base_costs = costs.costs_of(now), costs.costs_of(base)
        near_U = improve(now, now_costs, now.ranks_from(leading), kicks=kicks, seed=costs.seed, deadline=deadline)
        anew_U = search(base, base_costs, kicks=kicks, seed=costs.seed, deadline=deadline)
        better = [
            Splitted(now, now_costs, near_U, now_costs.step_ms(near_U)),
            Splitted(base, base_costs, anew_U, base_costs.step_ms(anew_U)),
        ]
        if task.splits.allowed:
            start = min(better, key=lambda one: one.step_ms)
            better += split_search(start.task, costs.costs_of, start.rank_U, deadline)
        found += [Candidate("measured+search", one.task.plan_from(one.rank_U), one.step_ms) for one in better]
        open_ = [candidate for candidate in found if candidate.plan.fingerprint not in profiles]
        estimated = costs.estimates(task, [leading, *(candidate.plan for candidate in open_)])
        worth = [estimated.of([0, number + 1]) for number in range(len(open_))]
        hopeful = max(range(len(open_)), key=lambda number: worth[number].worth_knowing, default=None)
        if hopeful is None or not pays(worth[hopeful], seconds):
            break
        seconds = measured([open_[hopeful].plan])
    found = list({candidate.plan.fingerprint: candidate for candidate in reversed(found)}.values())[::-1]
    expected = costs.estimates(task, [candidate.plan for candidate in found]).step_ms
    return [
        _judged(candidate, float(ms), profiles.get(candidate.plan.fingerprint))
        for candidate, ms in zip(found, expected, strict=True)
    ]


def best(candidates: Sequence[Candidate]) -> Candidate:
    """Of those that were measured, if any, the one expected to cost least."""
    return min(candidates, key=order)


def order(candidate: Candidate) -> tuple[bool, float]:
    """Sorts measured plans before predicted ones: a prediction alone never beats a measurement."""
    return candidate.measured_ms is None, candidate.estimate_ms


def _judged(candidate: Candidate, expected_ms: float, profile: StepProfile | None) -> Candidate:
    if profile is None:
        return replace(candidate, expected_ms=expected_ms)
    return replace(
        candidate, expected_ms=expected_ms, measured_ms=step_cost_ms(profile.ranks), measured_source=profile.source
    )
