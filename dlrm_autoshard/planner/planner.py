"""The planner: costs learned from measurements, algorithms by name, and `auto`, which takes the best of them all.

    planner = Planner(seed=0)
    planner.learn(samples)                                          # ShardSamples and CommsSamples, if there are any
    result = planner.plan(tables, stats, topology, batch_size=4096)
    planner.observe(profile); planner.refine(); planner.propose(result.plan, tables, stats, topology, batch_size=4096)

Seeded: the same calls give the same plan (unless `budget_seconds` cuts them short). No torch.distributed here: where
ranks can measure plans, the caller hands in `measure`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from dlrm_autoshard.costs import PLANNED_STAGES, RankCost, StepProfile, step_cost_ms
from dlrm_autoshard.plan import Constraints, PlanError, ShardingPlan, Topology
from dlrm_autoshard.planner.comms_law import CommsLaw
from dlrm_autoshard.planner.cost_model import CostModel, FitReport
from dlrm_autoshard.planner.dreamshard import DreamShard, DreamShardSettings, mdp_of
from dlrm_autoshard.planner.greedy import HEURISTICS, KEYS, heuristic
from dlrm_autoshard.planner.mdp import EstimatedMDP, Rollout
from dlrm_autoshard.planner.policy import DevicePolicy
from dlrm_autoshard.planner.published import PublishedDreamShard
from dlrm_autoshard.planner.rank_speed import RankSpeed
from dlrm_autoshard.planner.replay import CommsSample, ReplayBuffer, ShardSample, comms_of, shards_of
from dlrm_autoshard.planner.result import Candidate, PlanResult, RefineReport
from dlrm_autoshard.planner.search import greedy_on_cost, improve, search
from dlrm_autoshard.planner.sequence import SequencePolicy, SequenceSettings, SequenceTrainer
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts
from dlrm_autoshard.tables import TableConfig, TableStats

Measure = Callable[[Sequence[ShardingPlan]], list[StepProfile]]
MeasureTask = Callable[[PlacementTask, Sequence[ShardingPlan]], list[StepProfile]]
LEARNED = ("dreamshard", "autoshard", "rnn")
ALGORITHMS = ("auto", *LEARNED, "search", *HEURISTICS)
KICKS = 20
FEW_SHARDS = 100
"""With fewer start-up shards than this, refining holds on to what was believed (`_anchors`)."""
SMALL, MEDIUM = 2_000, 30_000
"""Units x ranks. Small: policies are trained on the task itself. Medium: sampled. Larger: one pass, one search."""


class Planner:
    """algorithm: one of ALGORITHMS. published: DreamShard to the letter, weak points included (only `dreamshard`)."""

    def __init__(
        self,
        algorithm: str = "auto",
        *,
        seed: int = 0,
        published: bool = False,
        cost_model: CostModel | None = None,
        settings: DreamShardSettings | None = None,
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise PlanError(f"there is no algorithm '{algorithm}'; there are {', '.join(ALGORITHMS)}.")
        self.algorithm = algorithm
        self.seed = seed
        self.settings = settings or DreamShardSettings()
        self.published = PublishedDreamShard(seed, self.settings) if published else None
        self.policy = DevicePolicy(seed)
        self.sequences = {
            "autoshard": SequencePolicy(seed, enriched=True),
            "rnn": SequencePolicy(seed, enriched=False),
        }
        self.cost_model = cost_model or CostModel(seed)
        self.law = CommsLaw()
        self.speed = RankSpeed()
        self.replay = ReplayBuffer()
        self.costs_from = "an analytic prior (bytes and lookups); nothing was measured"

    # -- costs: learned, observed, refined ---------------------------------------------------------------------------

    def learn(
        self,
        samples: Sequence[ShardSample | CommsSample],
        *,
        updates: int = 300,
        learning_rate: float = 2e-3,
        budget_seconds: float | None = None,
    ) -> FitReport:
        """Keeps start-up samples and fits the cost model to all that are kept."""
        for sample in samples:
            if isinstance(sample, CommsSample):
                self.replay.add_comms(sample)
            else:
                self.replay.add_shard(sample)
        return self._fit(updates, learning_rate, budget_seconds)

    def fit(
        self,
        tasks: Sequence[PlacementTask],
        measure: MeasureTask,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> FitReport:
        """DreamShard's training on many tasks: measured placements, the cost model, the policy, over and over.

        Generalizes to other tables and numbers of them. The placements measured are the policy's samples and, every
        other time, what `search` makes of them: the cost model must be right where searches end up.
        """
        if self.published is not None:
            self.published.train(tasks, measure)
            return FitReport(0, 0, (0.0, 0.0), (0.0, 0.0), 0.0)
        started = time.perf_counter()
        measured: list[StepProfile] = []
        reports: list[FitReport] = []

        def measure_one(task: PlacementTask, rollout: Rollout) -> None:
            rank_U = task.ranks_from(self._legal_plan(task, rollout))
            if len(measured) % 2:
                rank_U = improve(task, self._costs_of(task), rank_U, seed=self.seed)
            [profile] = measure(task, [task.plan_from(rank_U)])
            measured.append(profile)
            self.replay.comms.append(comms_of(profile))
            self.replay.shards.extend(shards_of(profile))
            if progress is not None:
                progress(len(measured), self.settings.iterations * self.settings.placements)

        def fit_costs() -> None:
            reports.append(self._fit(self.settings.cost_updates, 2e-3, None))

        trainer = DreamShard(self.policy, self.settings, self.seed)
        trainer.train(tasks, self._costs_of, measure_one, fit_costs)
        if self.algorithm in self.sequences:
            SequenceTrainer(self.sequences[self.algorithm], self._sequence_settings, self.seed).train(
                tasks, self._mdp_of
            )
        return replace(reports[-1], error_before=reports[0].error_before, seconds=time.perf_counter() - started)

    def observe(self, profile: StepProfile) -> None:
        """Keeps a profile of real steps (or of the probe on these ranks) to be learned from by `refine`."""
        if profile.source == "predicted":
            raise PlanError("a prediction is no observation: observe measured, probed or simulated profiles.")
        self.replay.add_profile(profile)

    def refine(
        self, updates: int = 300, *, learning_rate: float = 5e-4, budget_seconds: float | None = None
    ) -> RefineReport:
        """Learns each rank's speed, then fine-tunes the cost model, on start-up samples and observed profiles."""
        started = time.perf_counter()
        if not self.replay.profiles:
            raise PlanError("there is nothing to refine from: observe a profile first.")
        newest = self.replay.profiles[-1]
        before = self.stage_errors(newest)
        report = self._fit(updates, learning_rate, budget_seconds)
        return RefineReport(
            error_before=before,
            error_after=self.stage_errors(newest),
            profiles=len(self.replay.profiles),
            shards=report.samples,
            updates=report.updates,
            seconds=time.perf_counter() - started,
        )

    def stage_errors(self, profile: StepProfile) -> dict[str, float]:
        """Mean over ranks of |predicted / observed - 1|, by stage; ranks where a stage took no time are left out."""
        predicted = self.predict(profile.plan, profile.tables, profile.stats, profile.batch_size)
        errors = {}
        for stage in PLANNED_STAGES:
            pairs = [(p.stage(stage), o.stage(stage)) for p, o in zip(predicted, profile.ranks, strict=True)]
            relative = [abs(p / o - 1) for p, o in pairs if o > 0]
            errors[stage] = float(np.mean(relative)) if relative else 0.0
        return errors

    def predict(
        self,
        plan: ShardingPlan,
        tables: Sequence[TableConfig],
        stats: Sequence[TableStats],
        batch_size: int,
        topology: Topology | None = None,
    ) -> tuple[RankCost, ...]:
        topology = replace(topology or Topology(plan.world_size), memory_bytes=None)
        task = PlacementTask.build(tables, stats, topology, batch_size=batch_size)
        return self._costs_of(task).rank_costs(task.ranks_from(plan))

    # -- plans -------------------------------------------------------------------------------------------------------

    def plan(
        self,
        tables: Sequence[TableConfig],
        stats: Sequence[TableStats],
        topology: Topology,
        *,
        batch_size: int,
        table_bytes: Mapping[str, int] | None = None,
        constraints: Constraints = Constraints(),
        measure: Measure | None = None,
        measure_plans: int = 3,
        budget_seconds: float | None = None,
        current: ShardingPlan | None = None,
    ) -> PlanResult:
        """A legal plan by this planner's algorithm; PlanError where none exists.

        measure: called with plans, returns their profiles; `auto` measures its finalists with it. current: a plan
        that competes with the others (where it is legal).
        """
        started = time.perf_counter()
        deadline = None if budget_seconds is None else started + budget_seconds
        task = PlacementTask.build(
            tables, stats, topology, batch_size=batch_size, table_bytes=table_bytes, constraints=constraints
        )
        candidates = self._candidates(task, current, deadline)
        if measure is not None and measure_plans > 0 and self.algorithm == "auto":
            candidates = self._measure_finalists(task, candidates, measure, measure_plans, deadline)
        chosen = _best(candidates if self.algorithm == "auto" else [c for c in candidates if c.name == self.algorithm])
        task.check(chosen.plan)
        return PlanResult(
            plan=chosen.plan,
            algorithm=self.algorithm,
            chosen=chosen,
            predicted=self._costs_of(task).rank_costs(task.ranks_from(chosen.plan)),
            candidates=tuple(sorted(candidates, key=_evidence)),
            costs_from=self.costs_from,
            seconds=time.perf_counter() - started,
            seed=self.seed,
        )

    def propose(
        self,
        current: ShardingPlan,
        tables: Sequence[TableConfig],
        stats: Sequence[TableStats],
        topology: Topology,
        *,
        batch_size: int,
        table_bytes: Mapping[str, int] | None = None,
        constraints: Constraints = Constraints(),
        budget_seconds: float | None = None,
        most: int = 5,
    ) -> list[tuple[ShardingPlan, float]]:
        """Different plans with their predicted step cost in ms, best first, the current plan improved among them."""
        deadline = None if budget_seconds is None else time.perf_counter() + budget_seconds
        task = PlacementTask.build(
            tables, stats, topology, batch_size=batch_size, table_bytes=table_bytes, constraints=constraints
        )
        candidates = self._candidates(task, current, deadline, algorithm="auto")
        different: dict[ShardingPlan | str, Candidate] = {}
        for candidate in sorted(candidates, key=lambda c: c.predicted_ms):
            different.setdefault(candidate.plan.fingerprint, candidate)
        return [(candidate.plan, candidate.predicted_ms) for candidate in list(different.values())[:most]]

    def _candidates(
        self, task: PlacementTask, current: ShardingPlan | None, deadline: float | None, algorithm: str | None = None
    ) -> list[Candidate]:
        """Every heuristic, and what this planner's algorithm makes."""
        algorithm = algorithm or self.algorithm
        costs = self._costs_of(task)
        size = len(task.units) * task.world_size
        placements = {name: heuristic(task, name, np.random.default_rng(self.seed)) for name in HEURISTICS}
        if algorithm in ("auto", "search"):
            kicks = KICKS if size <= MEDIUM else 0
            placements["search"] = search(task, costs, kicks=kicks, seed=self.seed, deadline=deadline)
        if algorithm in LEARNED or (algorithm == "auto" and size <= MEDIUM):
            name = "dreamshard" if algorithm == "auto" else algorithm
            placements |= self._learned(name, task, deadline)
        if algorithm == "auto":
            if current is not None and _legal(task, current):
                placements["current"] = task.ranks_from(current.ordered(task.names))
            ranked = sorted(placements.items(), key=lambda item: costs.step_ms(item[1]))
            for name, rank_U in ranked if size <= MEDIUM else []:
                if name != "search" and not _late(deadline):
                    placements[f"{name}+search"] = improve(task, costs, rank_U, seed=self.seed, deadline=deadline)
        return [Candidate(name, task.plan_from(rank_U), costs.step_ms(rank_U)) for name, rank_U in placements.items()]

    def _learned(self, name: str, task: PlacementTask, deadline: float | None) -> dict[str, np.ndarray]:
        """The policy's placement, and its next best sample. The planner's own policy stays as `fit` left it."""
        if name == "dreamshard" and self.published is not None:
            if not self.published.trained_iterations:
                raise PlanError(
                    "the published DreamShard learns from measured placements only: call Planner.fit(tasks, measure), "
                    "or load a planner that was fitted (`dlrm-autoshard fit --published`)."
                )
            return {name: self.published.place(task)}
        size = len(task.units) * task.world_size
        mdp = self._mdp_of(task)
        if name == "dreamshard":
            most = 0 if size > MEDIUM else 16 if size > SMALL else self.settings.samples
            settings = replace(self.settings, samples=min(self.settings.samples, most))
            trainer = DreamShard(copy.deepcopy(self.policy), settings, self.seed)
            if size <= SMALL:
                trainer.train([task], self._costs_of, deadline=deadline)
            found = trainer.place(mdp)
        else:
            sequence = SequenceTrainer(copy.deepcopy(self.sequences[name]), self._sequence_settings, self.seed)
            if size <= SMALL:
                sequence.train([task], self._mdp_of, deadline)
            found = sequence.place(mdp)
        if not found:  # every episode overflowed: the cost model's greedy knows how to make room
            found = [greedy_on_cost(task, mdp.costs)]
        return {name: found[0], **({f"{name} sample": found[1]} if len(found) > 1 else {})}

    def _legal_plan(self, task: PlacementTask, rollout: Rollout) -> ShardingPlan:
        if rollout.overflow_E[0]:
            return task.plan_from(greedy_on_cost(task, self._costs_of(task)))
        return task.plan_from(rollout.rank_EU[0])

    def _measure_finalists(
        self,
        task: PlacementTask,
        candidates: list[Candidate],
        measure: Measure,
        measure_plans: int,
        deadline: float | None,
    ) -> list[Candidate]:
        """Measures the best few and the best heuristic, learns from that, and measures what then looks best."""
        ranked = sorted(candidates, key=lambda c: c.predicted_ms)
        best_heuristic = next(c for c in ranked if c.name in KEYS)
        finalists: dict[str, Candidate] = {}
        for candidate in [ranked[0], best_heuristic, *ranked]:
            if len(finalists) < max(1, measure_plans - 1):
                finalists.setdefault(candidate.plan.fingerprint, candidate)
        measured = _measured(list(finalists.values()), measure)
        for _, profile in measured:
            self.observe(profile)
        known = {c.plan.fingerprint: step_cost_ms(profile.ranks) for c, profile in measured}
        source = measured[0][1].source
        if measure_plans > len(finalists) and not _late(deadline):
            self.refine(100)
            costs = self._costs_of(task)
            start = task.ranks_from(min(measured, key=lambda pair: step_cost_ms(pair[1].ranks))[0].plan)
            better = [
                improve(task, costs, start, kicks=KICKS, seed=self.seed, deadline=deadline),
                search(task, costs, kicks=KICKS, seed=self.seed, deadline=deadline),
            ]
            rank_U = min(better, key=costs.step_ms)
            again = Candidate("refined+search", task.plan_from(rank_U), costs.step_ms(rank_U))
            if again.plan.fingerprint not in known:
                [(_, profile)] = _measured([again], measure)
                self.observe(profile)
                known[again.plan.fingerprint] = step_cost_ms(profile.ranks)
            candidates = [*candidates, again]
        return [
            replace(c, measured_ms=known[c.plan.fingerprint], measured_source=source)
            if c.plan.fingerprint in known
            else c
            for c in candidates
        ]

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that was learned and observed, as plain lists and numbers (JSON)."""
        return {
            "schema": 1,
            "cost_model": self.cost_model.to_json(),
            "comms": self.law.prices_S4.tolist(),
            "speed": self.speed.to_json(),
            "replay": self.replay.to_json(),
            "costs_from": self.costs_from,
            "policy": _weights(self.policy),
            "sequences": {name: _weights(policy) for name, policy in self.sequences.items()},
            "published": None if self.published is None else self.published.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("schema") != 1:
            raise PlanError(f"the planner's state has schema {state.get('schema')}; this version reads schema 1.")
        self.cost_model.load_json(state["cost_model"])
        self.law.prices_S4 = np.array(state["comms"])
        self.speed.load_json(state["speed"])
        self.replay = ReplayBuffer.from_json(state["replay"])
        self.costs_from = state["costs_from"]
        _load_weights(self.policy, state["policy"])
        for name, policy in self.sequences.items():
            _load_weights(policy, state["sequences"][name])
        if state["published"] is not None:
            self.published = PublishedDreamShard(self.seed, self.settings)
            self.published.load_state_dict(state["published"])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _costs_of(self, task: PlacementTask) -> TaskCosts:
        return TaskCosts(task, self.cost_model, self.law, self.speed)

    @property
    def _sequence_settings(self) -> SequenceSettings:
        """As many updates and episodes as DreamShard's policy gets."""
        settings = self.settings
        return SequenceSettings(
            updates=settings.iterations * settings.policy_updates, episodes=settings.episodes, samples=settings.samples
        )

    def _mdp_of(self, task: PlacementTask) -> EstimatedMDP:
        return mdp_of(task, self._costs_of(task))

    def _fit(self, updates: int, learning_rate: float, budget_seconds: float | None) -> FitReport:
        """Start-up samples and observed profiles, half of the weight each where there are both."""
        samples, weights = list(self.replay.shards), [1.0] * len(self.replay.shards)
        comms, comms_weights = list(self.replay.comms), [1.0] * len(self.replay.comms)
        observed: list[tuple[ShardSample, float]] = []
        observed_comms: list[tuple[CommsSample, float]] = []
        for (profile, weight), factors in zip(self.replay.weighted_profiles(), self._learn_speed(), strict=True):
            for shard in shards_of(profile):
                forward, backward = factors.get(shard.rank or 0, (1.0, 1.0))
                usual = replace(
                    shard, fwd_compute_ms=shard.fwd_compute_ms / forward, bwd_compute_ms=shard.bwd_compute_ms / backward
                )
                observed.append((usual, weight))
            observed_comms.append((comms_of(profile), weight))
        if observed and len(samples) < FEW_SHARDS:
            anchors = self._anchors(self.replay.profiles[-1])
            samples, weights = samples + anchors, weights + [1.0] * len(anchors)
        scale = _mass_for(len(samples), observed)
        samples += [shard for shard, _ in observed]
        weights += [weight * scale for _, weight in observed]
        scale = _mass_for(len(comms), observed_comms)
        comms += [sample for sample, _ in observed_comms]
        comms_weights += [weight * scale for _, weight in observed_comms]
        if comms:
            self.law.fit(comms, comms_weights)
        report = self.cost_model.fit(
            samples,
            weights,
            updates=updates,
            learning_rate=learning_rate,
            seed=self.seed,
            budget_seconds=budget_seconds,
        )
        if report.samples:
            sources = sorted({profile.source for profile in self.replay.profiles})
            self.costs_from = f"a cost model fitted to {len(self.replay.shards)} start-up shards" + (
                f" and {len(self.replay.profiles)} {' and '.join(sources)} profiles" if sources else ""
            )
        return report

    def _anchors(self, profile: StepProfile) -> list[ShardSample]:
        """Random shards of the profile's tables at the costs now believed.

        A planner that started from shipped weights has few samples of its own: fine-tuned on one plan alone it would
        forget what other table sets cost, and the next search would go where it forgot.
        """
        generator = np.random.default_rng(self.seed)
        pairs = list(zip(profile.tables, profile.stats, strict=True))
        shards = []
        for _ in range(FEW_SHARDS):
            count = int(np.exp(generator.uniform(0, np.log(len(pairs) + 0.999))))
            tables, stats = zip(*(pairs[i] for i in generator.choice(len(pairs), count, replace=False)), strict=True)
            shards.append(ShardSample(tables, stats, profile.batch_size, 1.0, 1.0))
        believed = self.cost_model.shard_ms(shards)
        return [
            replace(shard, fwd_compute_ms=float(forward), bwd_compute_ms=float(backward))
            for shard, (forward, backward) in zip(shards, believed, strict=True)
        ]

    def _learn_speed(self) -> list[dict[int, tuple[float, float]]]:
        """Every rank's speed now, and its factors at the time of each observed profile."""
        ratios, weights = [], []
        for profile, weight in self.replay.weighted_profiles():
            shards = shards_of(profile)
            predicted = self.cost_model.shard_ms(shards) if shards else np.zeros((0, 2))
            ratios.append(
                {
                    shard.rank or 0: (shard.fwd_compute_ms / forward, shard.bwd_compute_ms / backward)
                    for shard, (forward, backward) in zip(shards, predicted, strict=True)
                    if shard.fwd_compute_ms > 0 and shard.bwd_compute_ms > 0
                }
            )
            weights.append(weight**3)
        return self.speed.learn(ratios, weights)


def _mass_for(kept: int, observed: Sequence[tuple[object, float]]) -> float:
    """The factor on observed weights that makes them count as much as what is kept from start-up."""
    mass = sum(weight for _, weight in observed)
    return max(1.0, kept / mass) if mass else 1.0


def _weights(net: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in net.state_dict().items()}


def _load_weights(net: nn.Module, weights: Mapping[str, Any]) -> None:
    net.load_state_dict({name: torch.tensor(values) for name, values in weights.items()})


def _measured(candidates: list[Candidate], measure: Measure) -> list[tuple[Candidate, StepProfile]]:
    return list(zip(candidates, measure([candidate.plan for candidate in candidates]), strict=True))


def _evidence(candidate: Candidate) -> tuple[bool, float]:
    """Sorts measured plans before predicted ones: a prediction never beats a measurement."""
    measured = candidate.measured_ms
    return (measured is None, candidate.predicted_ms if measured is None else measured)


def _best(candidates: list[Candidate]) -> Candidate:
    return min(candidates, key=_evidence)


def _legal(task: PlacementTask, plan: ShardingPlan) -> bool:
    try:
        task.check(plan)
    except PlanError:
        return False
    return True


def _late(deadline: float | None) -> bool:
    return deadline is not None and time.perf_counter() > deadline
