"""Trains DreamShard on many tasks, in turn: measures placements, fits the cost model, trains the policy.

    report = fit_planner(costs, makers, "dreamshard", tasks, measure)       # measure(task, plans): their profiles

Measured placements are the policy's samples and, every other time, the results of a `search` from them, because the
cost model must be right where searches end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.candidates import CandidateMakers
from dlrm_autoshard.planner.costs.fit_costs import FitReport
from dlrm_autoshard.planner.costs.replay import comms_of, shards_of
from dlrm_autoshard.planner.dreamshard.dreamshard import DreamShard
from dlrm_autoshard.planner.dreamshard.mdp import EstimatedMDP, Rollout
from dlrm_autoshard.planner.learned_costs import LearnedCosts
from dlrm_autoshard.planner.search.greedy_on_cost import greedy_on_cost
from dlrm_autoshard.planner.search.local_search import improve
from dlrm_autoshard.planner.task import MeasureTask, PlacementTask


def fit_planner(
    costs: LearnedCosts,
    makers: CandidateMakers,
    algorithm: str,
    tasks: Sequence[PlacementTask],
    measure: MeasureTask,
    progress: Callable[[int, int], None] | None = None,
) -> FitReport:
    """Fits `costs`, and the policies in `makers` that `algorithm` needs. progress: called with placements measured, and
    of how many."""
    started, settings = time.perf_counter(), makers.settings
    placements, reports = 0, list[FitReport]()
    total = settings.iterations * settings.placements
    if algorithm == "autoshard":
        total += settings.iterations * settings.policy_updates * settings.episodes

    def counted(task: PlacementTask, plans: Sequence[ShardingPlan]) -> list[StepProfile]:
        nonlocal placements
        placements += len(plans)
        profiles = measure(task, plans)
        if progress is not None:
            progress(placements, total)
        return profiles

    if makers.policies.reference is not None:
        makers.policies.reference.train(tasks, counted)
        return FitReport(0, 0, (0.0, 0.0), (0.0, 0.0), time.perf_counter() - started)

    def measure_all(rollout: Rollout) -> None:
        task, now = rollout.mdp.task, rollout.mdp.costs
        for rank_U, overflow in zip(rollout.rank_EU, rollout.overflow_E, strict=True):
            placement = greedy_on_cost(task, now) if overflow else rank_U
            if placements % 2:
                placement = improve(task, now, placement, seed=makers.seed)
            [profile] = counted(task, [task.plan_from(placement)])
            costs.replay.add([comms_of(profile), *shards_of(profile)])

    def fit_costs() -> None:
        last = len(reports) + 1 == settings.iterations
        reports.append(costs.fit_costs(settings.cost_updates, correct=last))

    trainer = DreamShard(makers.policies.policy, settings, makers.seed)
    trainer.train(tasks, costs.costs_of, measure_all, fit_costs)
    if algorithm in makers.policies.sequences:
        sequence = makers.policies.sequence_trainer(makers.policies.sequences[algorithm])
        sequence.train(tasks, lambda task: EstimatedMDP(task, costs.costs_of(task)), measure=counted)
        makers.policies.sequences[algorithm].fitted.fill_(1.0)
    return replace(reports[-1], error_before=reports[0].error_before, seconds=time.perf_counter() - started)
