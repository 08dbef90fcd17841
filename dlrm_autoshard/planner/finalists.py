"""Which plans to measure, and what to expect of them afterwards: `auto`'s contest where plans can be measured.

candidates = measure_finalists(costs, task, candidates, measure, measure_plans=3)
best(candidates)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dlrm_autoshard.costs import StepProfile, step_cost_ms
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.candidates import KICKS, MEDIUM
from dlrm_autoshard.planner.learned_costs import LearnedCosts
from dlrm_autoshard.planner.result import Candidate
from dlrm_autoshard.planner.search.greedy import KEYS
from dlrm_autoshard.planner.search.greedy_on_cost import greedy_on_cost
from dlrm_autoshard.planner.search.local_search import deadline_in, late, optima
from dlrm_autoshard.planner.search.splits import Splitted, fitting, split_search
from dlrm_autoshard.planner.task import PlacementTask

WORTH_MEASURING = 0.001
"""Part of a step. What measuring must be expected to save, where nobody says how long the job is."""
STEPS_MEASURED = 15
"""Steps that measuring a plan costs, until one was measured: two rounds of five, exchanges, and drawing ids.
"""
RIVALS = 8
"""Placements of each search that compete to be measured next: the best by prediction is often one that is flattered."""
MOST_OFF = 2.0
"""Standard errors of a plan's own measurement by which what is expected of it may differ from that."""
Measure = Callable[[Sequence[ShardingPlan]], list[StepProfile]]


def measure_finalists(
    costs: LearnedCosts,
    task: PlacementTask,
    candidates: Sequence[Candidate],
    measure: Measure,
    measure_plans: int,
    more_seconds: float | None = None,
    steps: int | None = None,
) -> list[Candidate]:
    """All candidates and those found on the way, with what was measured and what is expected of each.

    The plan with the least predicted cost and the best heuristic are measured first. What that says about the tables
    corrects the predictions, and searches go on with these. Of the placements at which they end, that one is measured
    next which is worth most to know: it is expected to be faster than the best so far, or may be. And so on, until
    `measure_plans` are, or neither it nor all of them together are worth it. Every candidate gets `expected_ms`, the
    best estimate from all of it, and the least one that was measured wins: the best heuristic is among them, so the
    winner is never expected to be worse. more_seconds: that may be spent once the first two were measured. steps: for
    which the plan is to serve. Where what the first two would tell saves less time in them, on average, than measuring
    takes, as where an earlier job measured such plans, none is.
    """
    profiles: dict[str, StepProfile] = {}

    def pays(plans: Sequence[ShardingPlan], measuring: Sequence[ShardingPlan], kept: int | None = None) -> bool:
        told = costs.estimates(task, plans, placed=measuring)
        worth = told.worth_knowing(kept)
        if steps is None:
            return worth > WORTH_MEASURING
        return worth * steps * float(told.step_ms.min()) / 1000 > len(measuring) * seconds

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
    if steps is None or pays(list(first.values()), finalists):
        seconds = measured(finalists)
    deadline = deadline_in(more_seconds)
    while profiles and len(profiles) < measure_plans and not late(deadline, seconds):
        started = time.perf_counter()
        plans = [profile.plan for profile in profiles.values()]
        leading = plans[int(costs.estimates(task, plans).step_ms.argmin())]
        rivals = [r for r in (*found, *_rivals(costs, task, leading, deadline)) if r.plan.fingerprint not in profiles]
        if not rivals:
            break
        every = [leading, *(rival.plan for rival in rivals)]
        estimated = costs.estimates(task, every)
        worth = [estimated.of([0, number + 1]) for number in range(len(rivals))]
        hopeful = max(range(len(rivals)), key=lambda number: worth[number].worth_knowing(kept=0))
        two = [leading, rivals[hopeful].plan]
        if not (pays(two, two[1:], 0) or pays(every, every[1:], 0)):
            break
        found.append(rivals[hopeful])
        measured([rivals[hopeful].plan])
        seconds = time.perf_counter() - started
    found = list({candidate.plan.fingerprint: candidate for candidate in reversed(found)}.values())[::-1]
    expected = costs.estimates(task, [candidate.plan for candidate in found]).step_ms
    return [
        _judged(candidate, float(ms), profiles.get(candidate.plan.fingerprint))
        for candidate, ms in zip(found, expected, strict=True)
    ]


def _rivals(costs: LearnedCosts, task: PlacementTask, leading: ShardingPlan, deadline: float | None) -> list[Candidate]:
    """Where searches end that start from the leading plan, and anew; and what splitting tables makes of the best."""
    now, base = task.split_as(leading), fitting(task)
    kicks = KICKS if len(base.units) * task.world_size <= MEDIUM else 0
    now_costs, base_costs = costs.costs_of(now), costs.costs_of(base)
    starts = (
        (now, now_costs, now.ranks_from(leading)),
        (base, base_costs, greedy_on_cost(base, base_costs)),
    )
    found = []
    for of_task, of_costs, start_U in starts:
        ended = optima(of_task, of_costs, start_U, kicks=kicks, seed=costs.seed, deadline=deadline)[:RIVALS]
        found += [Splitted(of_task, of_costs, rank_U, of_costs.step_ms(rank_U)) for rank_U in ended]
    if task.splits.to_balance:
        start = min(found, key=lambda one: one.step_ms)
        found += split_search(start.task, costs.costs_of, start.rank_U, deadline)
    return [Candidate("measured+search", one.task.plan_from(one.rank_U), one.step_ms) for one in found]


def best(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the measured candidate, if any, that is expected to cost least."""
    return min(candidates, key=order)


def order(candidate: Candidate) -> tuple[bool, float]:
    """Sorts measured plans before predicted ones: a prediction alone never beats a measurement."""
    return candidate.measured_ms is None, candidate.estimate_ms


def _judged(candidate: Candidate, expected_ms: float, profile: StepProfile | None) -> Candidate:
    """Returns the candidate with what is expected of it. The posterior knows by other plans what a measurement's noise
    hides, and nothing beyond that: where the two disagree by more, the model is wrong, not the measurement."""
    if profile is None:
        return replace(candidate, expected_ms=expected_ms)
    measured_ms = step_cost_ms(profile.ranks)
    off = MOST_OFF * profile.standard_error * measured_ms
    expected_ms = min(max(expected_ms, measured_ms - off), measured_ms + off)
    return replace(candidate, expected_ms=expected_ms, measured_ms=measured_ms, measured_source=profile.source)
