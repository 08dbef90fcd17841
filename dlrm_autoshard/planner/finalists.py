"""Which plans to measure, and what to believe afterwards: `auto`'s contest where plans can be measured.

    candidates = measure_finalists(costs, task, candidates, measure, measure_plans=3)
    best(candidates)

The plan with the least predicted cost and the best heuristic are measured first. What that says about the tables
corrects the predictions; the search goes on with these, and what it finds is measured too: and so on, until
`measure_plans` are, or nothing better is in sight. Every candidate gets `expected_ms`, the best estimate from all of
it, and the least one that was measured wins: the best heuristic is among them, so the winner is never expected to be
worse.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dlrm_autoshard.costs import StepProfile, step_cost_ms
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.candidates import KICKS, MEDIUM, late
from dlrm_autoshard.planner.evidence import Evidence
from dlrm_autoshard.planner.greedy import KEYS
from dlrm_autoshard.planner.learned_costs import LearnedCosts
from dlrm_autoshard.planner.result import Candidate
from dlrm_autoshard.planner.search import improve, search
from dlrm_autoshard.planner.task import PlacementTask

WORTH_MEASURING = 0.003
"""The part of a step that a plan must be expected to save before it is measured."""
Measure = Callable[[Sequence[ShardingPlan]], list[StepProfile]]


def measure_finalists(
    costs: LearnedCosts,
    task: PlacementTask,
    candidates: Sequence[Candidate],
    measure: Measure,
    measure_plans: int,
    deadline: float | None = None,
) -> list[Candidate]:
    """All candidates and those found on the way, with what was measured and what is expected of each."""
    believed = costs.costs_of(task)
    evidence = Evidence(task, believed)
    profiles: dict[str, StepProfile] = {}

    def look_at(plans: Sequence[ShardingPlan]) -> float:
        started = time.perf_counter()
        measured = measure(plans)
        for profile in measured:
            profiles[profile.plan.fingerprint] = profile
            costs.observe(profile, task.topology)
        costs.learn_speed()
        evidence.add(measured, costs.costs_of(task))
        return (time.perf_counter() - started) / len(plans)

    ranked = sorted(candidates, key=lambda candidate: candidate.predicted_ms)
    first = {c.plan.fingerprint: c.plan for c in (ranked[0], next(c for c in ranked if c.name in KEYS), *ranked)}
    seconds = look_at(list(first.values())[: min(2, measure_plans)])
    found = list(candidates)
    kicks = KICKS if len(task.units) * task.world_size <= MEDIUM else 0
    while len(profiles) < measure_plans and not late(deadline, seconds):
        leading = min(
            (profile.plan for profile in profiles.values()), key=lambda p: evidence.step_ms(task.ranks_from(p))
        )
        better = [
            improve(task, evidence.costs, task.ranks_from(leading), kicks=kicks, seed=costs.seed, deadline=deadline),
            search(task, evidence.costs, kicks=kicks, seed=costs.seed, deadline=deadline),
        ]
        rank_U = min(better, key=evidence.costs.step_ms)
        plan = task.plan_from(rank_U)
        hoped = evidence.costs.step_ms(rank_U)
        if plan.fingerprint in profiles or hoped > (1 - WORTH_MEASURING) * evidence.step_ms(task.ranks_from(leading)):
            break
        seconds = look_at([plan])
        found.append(Candidate("measured+search", plan, believed.step_ms(rank_U)))
    return [_judged(candidate, evidence, task, profiles.get(candidate.plan.fingerprint)) for candidate in found]


def best(candidates: Sequence[Candidate]) -> Candidate:
    """Of those that were measured, if any, the one expected to cost least."""
    return min(candidates, key=order)


def order(candidate: Candidate) -> tuple[bool, float]:
    """Sorts measured plans before predicted ones: a prediction alone never beats a measurement."""
    return candidate.measured_ms is None, candidate.estimate_ms


def _judged(candidate: Candidate, evidence: Evidence, task: PlacementTask, profile: StepProfile | None) -> Candidate:
    expected = evidence.step_ms(task.ranks_from(candidate.plan))
    if profile is None:
        return replace(candidate, expected_ms=expected)
    return replace(
        candidate, expected_ms=expected, measured_ms=step_cost_ms(profile.ranks), measured_source=profile.source
    )
