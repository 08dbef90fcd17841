"""A planner's result: the plan, its predicted cost, and the candidates it was chosen from.

result.plan.shards_on(0)
result.best("lookup_greedy").predicted_ms, result.chosen.predicted_ms
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlrm_autoshard.costs import RankCost, step_cost_ms
from dlrm_autoshard.plan import ShardingPlan


@dataclass(frozen=True)
class Candidate:
    """A plan that was considered. name: the algorithm that made it, '+search' if local search improved it.

    measured_ms: its step cost, if measured; measured_source: 'probe', 'measured' or 'simulated'. expected_ms: if plans
    were measured, the best estimate from predictions and measurements together; noisy measurements count less.
    """

    name: str
    plan: ShardingPlan
    predicted_ms: float
    measured_ms: float | None = None
    measured_source: str | None = None
    expected_ms: float | None = None

    @property
    def estimate_ms(self) -> float:
        """The best estimate of its cost."""
        return self.predicted_ms if self.expected_ms is None else self.expected_ms

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "plan": self.plan.fingerprint}


@dataclass(frozen=True)
class Gain:
    """Saving of a candidate as a fraction of the current plan's planned stages: mean and standard deviation.

    0.02 +- 0.01 means that the four stages take 1 to 3% less.
    """

    mean: float
    std: float


@dataclass(frozen=True)
class PlanResult:
    """The chosen plan. predicted[r]: rank r's cost; costs_from: the origin of the predictions. would_split: a plan with
    split tables that is predicted to cost less, if splitting is not allowed."""

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
        """Returns the candidate of that name with the lowest predicted cost; KeyError if there is none."""
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
