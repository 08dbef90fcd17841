"""A planner's result: the plan, its predicted cost, and everything it was chosen from.

result.plan.tables_on(0)
result.best("lookup_greedy").predicted_ms, result.chosen.predicted_ms
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlrm_autoshard.costs import RankCost, step_cost_ms
from dlrm_autoshard.plan import ShardingPlan


@dataclass(frozen=True)
class Candidate:
    """One plan that was considered. `name`: the algorithm that made it, '+search' where local search improved it.

    measured_ms: its step cost as measured, where it was; measured_source: 'probe', 'measured' or 'simulated'.
    expected_ms: the best estimate from predictions and measurements together, where plans were measured: a noisy
    measurement counts less.
    """

    name: str
    plan: ShardingPlan
    predicted_ms: float
    measured_ms: float | None = None
    measured_source: str | None = None
    expected_ms: float | None = None

    @property
    def estimate_ms(self) -> float:
        """The best that is known of its cost."""
        return self.predicted_ms if self.expected_ms is None else self.expected_ms

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "plan": self.plan.fingerprint}


@dataclass(frozen=True)
class Gain:
    """Saving of a candidate over the current plan: a part of the predicted step, and how sure that is.

    mean and std are of the estimate; 0.02 +- 0.01 says that the four stages take 1 to 3% less.
    """

    mean: float
    std: float


@dataclass(frozen=True)
class PlanResult:
    """`predicted[r]` is rank r's cost under `plan`; `costs_from` says what the predictions rest on. would_split: a plan
    with split tables that is predicted to cost less, where they may not be split."""

    plan: ShardingPlan
    algorithm: str
    chosen: Candidate
    predicted: tuple[RankCost, ...]
    candidates: tuple[Candidate, ...]
    costs_from: str
    seconds: float
    seed: int
    would_split: Candidate | None = None

    @property
    def predicted_ms(self) -> float:
        return step_cost_ms(self.predicted)

    def best(self, name: str) -> Candidate:
        """The candidate called `name` with the least predicted cost; KeyError where there is none."""
        named = [candidate for candidate in self.candidates if candidate.name == name]
        if not named:
            raise KeyError(f"no candidate is called '{name}'; there are {[c.name for c in self.candidates]}")
        return min(named, key=lambda candidate: candidate.predicted_ms)

    def to_json(self) -> dict[str, Any]:
        split = self.would_split
        return {
            "schema": 1,
            "plan": self.plan.to_json(),
            "algorithm": self.algorithm,
            "chosen": self.chosen.to_json(),
            "predicted_ms": self.predicted_ms,
            "predicted": [cost.to_json() for cost in self.predicted],
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "costs_from": self.costs_from,
            "seconds": self.seconds,
            "seed": self.seed,
            **({} if split is None else {"would_split": {**split.to_json(), "tables": [*split.plan.split_tables]}}),
        }
