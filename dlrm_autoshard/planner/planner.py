"""The planner: learned costs, algorithms by name, and `auto`, which chooses the best of them.

    result = planner.plan(PlacementTask.build(tables, stats, topology, batch_size=4096))

Seeded: equal calls give equal plans, unless `budget_seconds` ends them early. Needs no torch.distributed: the caller
passes `measure` if ranks can measure plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dlrm_autoshard.costs import RankCost
from dlrm_autoshard.formats.json_file import checked
from dlrm_autoshard.plan import PlanError, ShardingPlan
from dlrm_autoshard.planner.candidates import ALGORITHMS, CandidateMakers
from dlrm_autoshard.planner.costs.cost_model import CostModel
from dlrm_autoshard.planner.costs.fit_costs import FitReport
from dlrm_autoshard.planner.dreamshard.settings import PUBLISHED, DreamShardSettings
from dlrm_autoshard.planner.finalists import Measure, best, measure_finalists, order
from dlrm_autoshard.planner.learned_costs import LearnedCosts
from dlrm_autoshard.planner.moves.proposals import proposals
from dlrm_autoshard.planner.result import Candidate, Gain, PlanResult
from dlrm_autoshard.planner.saved_state import PlannerRecord
from dlrm_autoshard.planner.search.local_search import deadline_in
from dlrm_autoshard.planner.search.splits import split_search
from dlrm_autoshard.planner.task import MeasureTask, PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts

__all__ = ["ALGORITHMS", "Measure", "MeasureTask", "Planner"]

FINALISTS_SHARE = 0.15
"""Fraction of the budget for measuring finalists after the first two."""


class Planner:
    """Plans tasks and learns costs. algorithm: one of ALGORITHMS. reference: `dreamshard` exactly as published."""

    def __init__(
        self,
        algorithm: str = "auto",
        *,
        seed: int = 0,
        reference: bool = False,
        cost_model: CostModel | None = None,
        settings: DreamShardSettings | None = None,
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise PlanError(f"there is no algorithm '{algorithm}'; there are {', '.join(ALGORITHMS)}.")
        self.seed = seed
        self.costs = LearnedCosts(seed, cost_model)
        self.algorithm = algorithm
        self.settings = settings or (PUBLISHED if reference else DreamShardSettings())
        self.makers = CandidateMakers(self.settings, seed, reference)

    def fit(
        self,
        tasks: Sequence[PlacementTask],
        measure: MeasureTask,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> FitReport:
        """Runs DreamShard's training on many tasks (`fit_planner.py`). Generalizes to other tables and numbers of
        them."""
        from dlrm_autoshard.planner.dreamshard.fit_planner import fit_planner  # no start needs it

        return fit_planner(self.costs, self.makers, self.algorithm, tasks, measure, progress)

    def plan(
        self,
        task: PlacementTask,
        *,
        measure: Measure | None = None,
        measure_plans: int = 12,
        budget_seconds: float | None = None,
        steps: int | None = None,
    ) -> PlanResult:
        """Returns a legal plan by this planner's algorithm; PlanError if there is none.

        measure: returns profiles of plans; `auto` measures its finalists with it. steps: that the plan serves, if
        known; with few steps measuring may not pay.
        """
        started = time.perf_counter()
        deadline = deadline_in(budget_seconds)
        candidates = self.makers.candidates(self.algorithm, task, self.costs.costs_of, deadline)
        if_allowed = list[Candidate]()
        if self.algorithm == "auto":
            candidates += self._splitted(task, candidates, deadline)
            allowed = replace(task, splits=replace(task.splits, allowed=True, rows_to_balance=False))
            if_allowed = [] if task.splits.allowed else self._splitted(allowed, candidates, deadline)
        if measure is not None and measure_plans > 0 and self.algorithm == "auto":
            more = None if budget_seconds is None else FINALISTS_SHARE * budget_seconds
            candidates = measure_finalists(self.costs, task, candidates, measure, measure_plans, more, steps)
        chosen = best(candidates if self.algorithm == "auto" else [c for c in candidates if c.name == self.algorithm])
        task.check(chosen.plan)
        return PlanResult(
            plan=chosen.plan,
            algorithm=self.algorithm,
            chosen=chosen,
            predicted=self.costs.predict(task, chosen.plan),
            candidates=tuple(sorted(candidates, key=order)),
            costs_from=self.costs.costs_from,
            seconds=time.perf_counter() - started,
            seed=self.seed,
            would_split=next(iter(if_allowed), None),
        )

    def _splitted(
        self, task: PlacementTask, candidates: Sequence[Candidate], deadline: float | None
    ) -> list[Candidate]:
        """Returns a candidate with split tables, if it is predicted to cost less than the best without."""
        best_plan = min(candidates, key=lambda candidate: candidate.predicted_ms).plan
        start = task.split_as(best_plan)
        found = split_search(start, self.costs.costs_of, start.ranks_from(best_plan), deadline)
        return [Candidate("split+search", one.task.plan_from(one.rank_U), one.step_ms) for one in found]

    def propose(
        self, task: PlacementTask, current: ShardingPlan, ms_per_byte: float = 0.0, budget_seconds: float | None = None
    ) -> list[tuple[ShardingPlan, float]]:
        """Returns different plans with their predicted step in ms, best first (`moves/proposals.py`).

        ms_per_byte: cost of moving a byte, spread over the remaining steps."""
        return proposals(self.costs, self.makers, task, current, ms_per_byte, deadline_in(budget_seconds))

    def predict(self, task: PlacementTask, plan: ShardingPlan) -> tuple[RankCost, ...]:
        """Returns each rank's cost under `plan`, legal or not."""
        return self.costs.predict(task, plan)

    def step_costs(self, task: PlacementTask) -> Callable[[ShardingPlan], float]:
        """Returns a function from a plan, legal or not, to its predicted step in ms, for many plans of one task."""
        costs_by_shards: dict[frozenset[str], tuple[PlacementTask, TaskCosts]] = {}

        def step_ms(plan: ShardingPlan) -> float:
            shards = frozenset(plan.rank_of)
            if shards not in costs_by_shards:
                free = task.covering([plan])
                costs_by_shards[shards] = free, self.costs.costs_of(free)
            free, costs = costs_by_shards[shards]
            return costs.step_ms(free.placed(plan))

        return step_ms

    def gains(self, task: PlacementTask, current: ShardingPlan, candidates: Sequence[ShardingPlan]) -> list[Gain]:
        """Returns the share of the current plan's predicted step that each candidate saves."""
        return [Gain(float(saved.mean()), float(saved.std())) for saved in self.saved(task, current, candidates).T]

    def saved(self, task: PlacementTask, current: ShardingPlan, candidates: Sequence[ShardingPlan]) -> np.ndarray:
        """Returns savings [D, P], one row for each posterior draw."""
        saved_DP: np.ndarray = self.costs.estimates(task, [current, *candidates]).saved_DP(0)[:, 1:]
        return saved_DP

    def rank_slowness(self, world_size: int, expected_speed: Sequence[float] | None = None) -> np.ndarray:
        """Returns each rank's factor [W] on compute time. expected_speed: of ranks that were never observed."""
        return self.costs.rank_slowness(world_size, expected_speed)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns everything learned and observed as JSON."""
        return {
            "schema": 2,
            "algorithm": self.algorithm,
            "costs": self.costs.to_json(),
            **self.makers.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state, but keeps this planner's algorithm. FormatError names a missing, unknown or wrong key."""
        if state.get("schema") != 2:
            raise PlanError(f"the planner's state has schema {state.get('schema')}; this version reads schema 2.")
        record = checked(PlannerRecord, state)
        self.costs.load_json(record["costs"])
        self.makers.load_state_dict(record)
