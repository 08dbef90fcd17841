"""Chooses which plans to measure, and combines measurements with predictions: `auto`'s final contest.

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
"""Fraction of a step that measuring must be expected to save, if the job's length is unknown."""
STEPS_MEASURED = 15
"""Steps that measuring a plan is assumed to cost before one was measured: two rounds of five, exchanges, drawing
ids."""
RIVALS = 8
"""Results of each search that compete to be measured; the best predicted one often owes it to an error."""
MOST_OFF = 2.0
"""Standard errors by which a plan's expected cost may differ from its own measurement."""
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
    """Measures some candidates; returns all, and those found on the way, with `expected_ms` and measurements.

    The plan with the lowest predicted cost and the best heuristic are measured first. That corrects the predictions,
    and searches continue with the corrected ones. Of their results the one with the highest value of information is
    measured next, until `measure_plans` are, or measuring neither it nor all of them would pay. Every candidate gets
    `expected_ms`, the best estimate from everything; the lowest among measured plans wins. The best heuristic is one of
    them, so the winner is never expected to be worse.

    more_seconds: for measuring after the first two. steps: that the plan serves. If measuring the first two would save
    less time in them, on average, than it takes (as when an earlier job measured such plans), nothing is measured.
    """
    profiles: dict[str, StepProfile] = {}

    def pays(plans: Sequence[ShardingPlan], measuring: Sequence[ShardingPlan], kept: int | None = None) -> bool:
        known = costs.estimates(task, plans, placed=measuring)
        worth = known.worth_knowing(kept)
        if steps is None:
            return worth > WORTH_MEASURING
        return worth * steps * float(known.step_ms.min()) / 1000 > len(measuring) * seconds

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
    """Returns results of searches from the leading plan and from scratch, and of splitting tables of the best."""
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
    """Returns the candidate with the lowest expected cost, a measured one if there is any."""
    return min(candidates, key=order)


def order(candidate: Candidate) -> tuple[bool, float]:
    """Sort key that puts measured plans before predicted ones: a prediction never beats a measurement."""
    return candidate.measured_ms is None, candidate.estimate_ms


def _judged(candidate: Candidate, expected_ms: float, profile: StepProfile | None) -> Candidate:
    """Returns the candidate with its expected cost, limited to MOST_OFF standard errors around its own measurement.

    The posterior may correct a measurement's noise by other plans; a larger difference is an error of the model."""
    if profile is None:
        return replace(candidate, expected_ms=expected_ms)
    measured_ms = step_cost_ms(profile.ranks)
    off = MOST_OFF * profile.standard_error * measured_ms
    expected_ms = min(max(expected_ms, measured_ms - off), measured_ms + off)
    return replace(candidate, expected_ms=expected_ms, measured_ms=measured_ms, measured_source=profile.source)
