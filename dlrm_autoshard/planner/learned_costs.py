"""A planner's costs, and how it learns them: from start-up samples and from profiles of real steps.

costs.learn(samples)                     # ShardSamples and CommsSamples of the micro-benchmark
costs.observe(profile)                   # after each interval: conditions the corrections on it
costs.predict(task, plan)                # [W] RankCosts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dlrm_autoshard.costs import RankCost, StepProfile, rank_costs
from dlrm_autoshard.plan import PlanError, ShardingPlan, Topology
from dlrm_autoshard.planner.corrections.corrections import Corrections
from dlrm_autoshard.planner.costs.cost_model import CostModel
from dlrm_autoshard.planner.costs.exchange_model import ExchangeModel
from dlrm_autoshard.planner.costs.fit_costs import FitReport, fit_cost_model
from dlrm_autoshard.planner.costs.replay import CommsSample, ReplayBuffer, ShardSample, comms_of
from dlrm_autoshard.planner.estimates import Estimates, estimates, expected_ms
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts

MOST_START_UP = 200
"""Most start-up shards that the corrections are conditioned on."""


class LearnedCosts:
    """Learns and predicts costs. costs_from: the origin of the predictions, in words."""

    def __init__(self, seed: int = 0, cost_model: CostModel | None = None) -> None:
        self.seed = seed
        self.cost_model = cost_model or CostModel(seed)
        self.exchange = ExchangeModel()
        self.corrections = Corrections()
        self.replay = ReplayBuffer()
        self.costs_from = "an analytic prior (bytes and lookups); nothing was measured"

    def costs_of(self, task: PlacementTask) -> TaskCosts:
        """Returns the current costs for one task."""
        return TaskCosts(task, self.cost_model, self.exchange, self.corrections)

    def learn(
        self,
        samples: Sequence[ShardSample | CommsSample],
        *,
        updates: int = 300,
        budget_seconds: float | None = None,
    ) -> FitReport:
        """Adds start-up samples and fits the cost model to all."""
        self.replay.add(samples)
        return self.fit_costs(updates, budget_seconds)

    def observe(self, profile: StepProfile, topology: Topology | None = None) -> None:
        """Learns from a profile of real steps or of the probe, by arithmetic only: no network is trained.

        topology: supplies the ranks' hosts if the profile lacks them.
        """
        if profile.source == "predicted":
            raise PlanError("a prediction is not an observation: observe measured, probed or simulated profiles.")
        if profile.hosts is None and topology is not None:
            profile = replace(profile, hosts=topology.hosts)
        self.replay.add_profile(profile)
        self.corrections.observe(profile)
        self._fit_exchange()
        self._correct()

    def observe_shards(self, samples: Sequence[ShardSample]) -> None:
        """Learns from a few shards that the micro-benchmark measured, by arithmetic only: no network is trained."""
        self.replay.add(samples)
        self._correct()

    def predict(self, task: PlacementTask, plan: ShardingPlan) -> tuple[RankCost, ...]:
        """Returns each rank's predicted cost [W] under `plan`, legal or not."""
        free = task.covering([plan])
        ms_W4, _ = expected_ms(free, self.costs_of(free), self.corrections, free.placed(plan))
        return rank_costs(ms_W4)

    def rank_slowness(self, world_size: int, expected_speed: Sequence[float] | None = None) -> np.ndarray:
        """Returns each rank's factor [W] on compute time. expected_speed: of ranks that were never observed."""
        slowness: np.ndarray = self.corrections.rank_factors_W2(world_size, expected_speed).mean(axis=1)
        return slowness

    @property
    def ranks_changed(self) -> bool:
        """Whether a rank's speed has changed since the last but one observation, as opposed to the tables' costs."""
        return self.corrections.ranks_changed

    def estimates(
        self, task: PlacementTask, plans: Sequence[ShardingPlan], *,
        alone: Sequence[str] | None = None, placed: Sequence[ShardingPlan] = (),
    ) -> Estimates:  # fmt: skip
        """Returns estimates of plans, legal or not, from all measurements. alone, placed: as if these tables had been
        measured alone, or these plans."""
        free = task.covering(plans)
        tables = None if alone is None else [free.names.index(name) for name in alone if name in free.names]
        rank_PU, seen_PU = ([free.placed(plan) for plan in some] for some in (plans, placed))
        return estimates(free, self.costs_of(free), self.corrections, rank_PU, alone=tables, placed=seen_PU)

    def fit_costs(self, updates: int, budget_seconds: float | None = None, *, correct: bool = True) -> FitReport:
        """Fits to start-up samples. correct: also condition the corrections on them; a training that fits often needs
        that only at its end."""
        self._fit_exchange()
        report = fit_cost_model(
            self.cost_model,
            self.replay.shards,
            updates=updates,
            seed=self.seed,
            budget_seconds=budget_seconds,
        )
        if report.samples:
            if correct:
                self._correct()
            self.costs_from = f"a cost model fitted to {len(self.replay.shards)} start-up shards"
        return report

    def _fit_exchange(self) -> None:
        """Fits to start-up samples and observed profiles, with half of the weight each if there are both."""
        kept, observed = self.replay.comms, [(comms_of(p), weight) for p, weight in self.replay.weighted_profiles()]
        scale = _mass_for(len(kept), observed)
        weights = [1.0] * len(kept) + [weight * scale for _, weight in observed]
        if weights:
            self.exchange.fit([*kept, *(sample for sample, _ in observed)], weights)

    def _correct(self) -> None:
        self.corrections.fit(self.cost_model, self.exchange, self.replay.shards[-MOST_START_UP:])

    def to_json(self) -> dict[str, Any]:
        return {
            "cost_model": self.cost_model.to_json(),
            "comms": self.exchange.prior_SP.tolist(),
            "corrections": self.corrections.to_json(),
            "replay": self.replay.to_json(),
            "costs_from": self.costs_from,
        }

    def load_json(self, record: Mapping[str, Any]) -> None:
        self.cost_model.load_json(record["cost_model"])
        self.exchange.load_prices(record["comms"])
        self.replay = ReplayBuffer.from_json(record["replay"])
        self.corrections.load_json(record["corrections"], self.replay.profiles)
        self.costs_from = record["costs_from"]
        self._fit_exchange()
        self._correct()


def _mass_for(kept: int, observed: Sequence[tuple[object, float]]) -> float:
    """Returns the factor that makes observed weights count as much as the start-up samples."""
    mass = sum(weight for _, weight in observed)
    return max(1.0, kept / mass) if mass else 1.0
