"""Whole jobs in simulation: the real planner, watch and controller on ranks that are arithmetic, against an oracle.

Shard costs are recorded fbgemm costs (`recorded_cluster.py`), data or ranks change as a scenario's name says. The
oracle plans anew at each change and moves for nothing. The clock that decisions see counts calls, so a seed decides
alike on any machine; `without` leaves out rules of the decision.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args
from unittest.mock import patch

import numpy as np

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.controller import Controller
from dlrm_autoshard.autoshard.decide import History
from dlrm_autoshard.autoshard.decision import Interval, error_of_median
from dlrm_autoshard.autoshard.watch import Watch
from dlrm_autoshard.benchmarks.harness import BenchError, Findings
from dlrm_autoshard.benchmarks.paired import median_with_interval
from dlrm_autoshard.benchmarks.recorded_cluster import Disturbed, RecordedCluster
from dlrm_autoshard.benchmarks.slices import in_slices, origins
from dlrm_autoshard.config import AutoshardConfig, ProfileConfig, ReshardConfig
from dlrm_autoshard.costs import StepProfile, rank_costs
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import start_costs
from dlrm_autoshard.records.decisions import DecisionLog
from dlrm_autoshard.tables import TableConfig, TableStats

TITLE = "resharding on 8 simulated ranks, 40 tables, six scenarios: seconds above an oracle, false moves, recovery"
ROUGH_TIME = "15 min on one core (quick: 20 s)"
ScenarioName = Literal["calm", "abrupt", "gradual", "hot-ids", "straggler", "tight"]
SCENARIOS: tuple[ScenarioName, ...] = get_args(ScenarioName)
EPOCHS, STEPS, BATCH, DENSE_MS = 12, 400, 8192, 2.0
MOVE_SECONDS, MOVE_BYTES_PER_SECOND, SAMPLING = 0.1, 1e9, 0.2
"""Seconds and bytes/s of a move; part of a step by which a sampled one is longer."""
RULES = ("sure", "look", "hysteresis", "return", "watch")
RECOVERED_WITHIN, REFUSED, TICK_SECONDS = 0.02, 0.1, 1e-3
"""Part of the oracle's step; share of refused moves, with real noise; seconds that a clock's call counts."""


def run(quick: bool, without: Sequence[str] = ()) -> dict[str, Any]:
    seeds, scenarios, noises = (1, SCENARIOS[1:2], ("real",)) if quick else (6, SCENARIOS, ("quiet", "real"))
    if unknown := set(without).difference(RULES):
        raise BenchError(f"there is no rule '{min(unknown)}'; there are {', '.join(sorted(RULES))}.")
    keys = [(w, s, 8, 40, n, *without) for s in range(seeds) for w in scenarios for n in noises]
    kept = None if quick else Path("runs/race-simulated/rows.jsonl")
    rows = in_slices(kept, keys, simulate)
    return {**summarise(rows), **origins(rows)}


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures, targets, spread, notes. rows: of `simulate`, with its arguments as `of`."""
    found = Findings()
    found.notes = [
        "simulated: no rank runs. Shards cost what recorded fbgemm shards did, interpolated; exchanges by a formula.",
        "real noise: stages of a rank's step correlated by 0.72, one step in ten beyond three robust standard "
        "deviations, moments of ranks and of the machine, dense parts that follow a slow rank, refusals.",
        "a false move: one after which a step takes longer, exactly.",
    ]
    for noise, scenario in itertools.product(("quiet", "real"), SCENARIOS):
        jobs = [row for row in rows if row["of"][0] == scenario and row["of"][4] == noise]
        if not jobs:
            continue
        cell = f"{noise} noise, {scenario}"
        for name, values in (
            ("above the oracle, %", [100 * (job["loop"] / job["oracle"] - 1) for job in jobs]),
            ("without resharding, %", [100 * (job["static"] / job["oracle"] - 1) for job in jobs]),
            ("epochs to recover", [job["epochs_to_recover"] for job in jobs]),
        ):
            found.put(f"{cell}: {name}", median_with_interval(values))
        kinds = ("moves", "false", "refused", "rolled_back")
        found.put(f"{cell}: moves, false, refused, taken back", [fmean(job[k] for job in jobs) for k in kinds])
        found.put(f"{cell}: overhead, %", 100 * fmean(job["overhead"] for job in jobs))
        worst = max(job["loop"] / job["static"] for job in jobs)
        found.put(f"{cell}: worst job, loop on / static", worst, "<= 1.02")
    return vars(found)


@dataclass(frozen=True)
class SimulatedJob:
    """A job of a scenario: its tables, data, ranks and oracle."""

    name: ScenarioName
    seed: int
    world_size: int
    num_tables: int

    @cached_property
    def pool(self) -> Any:
        return synthetic_pool(self.num_tables, seed=1000 + self.seed, batch_size=BATCH)

    @cached_property
    def stats_by_epoch(self) -> list[list[TableStats]]:
        stats: Sequence[TableStats] = self.pool.stats
        other = np.random.default_rng([SCENARIOS.index(self.name), self.seed]).permutation(len(stats))
        by_epoch = []
        for epoch in range(EPOCHS):
            later = [stats[o] for o in other] if epoch >= self.change else stats
            if self.name == "hot-ids":  # other rows are hot, and more or fewer of them
                by_epoch.append(
                    [
                        replace(s, mean_reuse=o.mean_reuse, reuse_histogram=o.reuse_histogram)
                        for s, o in zip(stats, later, strict=True)
                    ]
                )
                continue
            part = {"abrupt": float(epoch >= self.change), "gradual": 0.5 * epoch / (EPOCHS - 1)}.get(self.name, 0.0)
            now, then = np.log([s.mean_pooling for s in stats]), np.log([stats[o].mean_pooling for o in other])
            pooling = np.exp((1 - part) * now + part * then)
            by_epoch.append([replace(s, mean_pooling=float(p)) for s, p in zip(stats, pooling, strict=True)])
        return by_epoch

    @property
    def change(self) -> int:
        return int(np.random.default_rng([self.seed, 7]).integers(EPOCHS // 4, EPOCHS // 2 + 1))

    def slowdown(self, epoch: int) -> dict[int, float]:
        """Returns rank -> times longer that it computes."""
        busy = self.name == "straggler" and self.change <= epoch < self.change + EPOCHS // 3
        rank = int(np.random.default_rng([self.seed, 8]).integers(self.world_size))
        return {rank: 2.0} if busy else {}

    def memory_bytes(self, tables: Sequence[TableConfig]) -> tuple[int, ...] | None:
        """Returns each rank's bytes in a tight scenario: 2% more than the fullest needs where tables go largest
        first."""
        if self.name != "tight":
            return None
        loads = [0] * self.world_size
        for size in sorted((table.weight_bytes for table in tables), reverse=True):
            loads[loads.index(min(loads))] += size
        return (round(1.02 * max(loads)),) * self.world_size

    def task(self, epoch: int, speed: tuple[float, ...] | None = None) -> PlacementTask:
        topology = Topology(self.world_size, memory_bytes=self.memory_bytes(self.pool.tables), speed=speed)
        stats = self.stats_by_epoch[epoch]
        return PlacementTask.build(self.pool.tables, stats, topology, batch_size=BATCH, table_bytes=self.bytes_of)

    @property
    def bytes_of(self) -> dict[str, int]:
        return {table.name: table.weight_bytes for table in self.pool.tables}

    @cached_property
    def cluster(self) -> RecordedCluster:
        return RecordedCluster(self.pool.tables, self.seed)

    def stages_W4(self, epoch: int, plan: ShardingPlan) -> np.ndarray:
        """Exact."""
        self.cluster.slowdown = self.slowdown(epoch)
        return self.cluster.stages_ms(self.stats_by_epoch[epoch], plan, BATCH)

    def step_ms(self, epoch: int, plan: ShardingPlan) -> float:
        return DENSE_MS + float(self.stages_W4(epoch, plan).max(axis=0).sum())

    def planned(self, epoch: int, seed: int) -> tuple[Planner, ShardingPlan]:
        """As a job starts: calibrated, finalists measured on the ranks. A busy rank's speed is known."""
        stats, slow, cluster = self.stats_by_epoch[epoch], self.slowdown(epoch), self.cluster
        cluster.slowdown = slow
        planner = Planner(seed=seed)
        start_costs(
            planner,
            self.task(epoch),
            fingerprint={},
            measure_shards=lambda shards: cluster.measure_shards(stats, BATCH, shards),
            seed=seed,
        )
        speed = tuple(1 / slow.get(rank, 1.0) for rank in range(self.world_size)) if slow else None

        def measure(plans: Sequence[ShardingPlan]) -> list[StepProfile]:
            return [cluster.profile(stats, plan, BATCH) for plan in plans]

        return planner, planner.plan(self.task(epoch, speed), measure=measure).plan


@lru_cache(maxsize=64)
def _started(job: SimulatedJob) -> tuple[Planner, ShardingPlan, list[float]]:
    """The planner and plan that the job starts with, and the oracle's step in ms by epoch."""
    planner, start = job.planned(0, job.seed)
    best, oracle = start, []
    for epoch in range(EPOCHS):
        now = (job.stats_by_epoch[epoch], job.slowdown(epoch))
        if epoch and now != (job.stats_by_epoch[epoch - 1], job.slowdown(epoch - 1)):
            _, plan = job.planned(epoch, job.seed + 1)
            best = min((best, start, plan), key=lambda p: job.step_ms(epoch, p))
        oracle.append(job.step_ms(epoch, best))
    return planner, start, oracle


def simulate(name: ScenarioName, seed: int, ranks: int, tables: int, noise: str, *without: str) -> dict[str, float]:
    """One job's seconds with and without resharding and under the oracle, and what resharding did."""
    with patch("time.perf_counter", itertools.count(0.0, TICK_SECONDS).__next__):
        job = SimulatedJob(name, seed, ranks, tables)
        planner, start, oracle = _started(job)
        loop = _Loop(job, copy.deepcopy(planner), start, noise == "real", without)
        with loop.left_out(without):
            loop.run()
    by_epoch = [fmean(loop.step_ms[e * STEPS : (e + 1) * STEPS]) for e in range(EPOCHS)]
    slower = [ms > (1 + RECOVERED_WITHIN) * oracle[at // STEPS] for at, ms in enumerate(loop.step_ms)]
    late = [at for at in range(job.change * STEPS, len(slower)) if slower[at]]
    seconds = sum(loop.step_ms) / 1000
    return {
        "static": STEPS * sum(job.step_ms(e, start) for e in range(EPOCHS)) / 1000,
        "oracle": STEPS * sum(oracle) / 1000,
        "loop": STEPS * sum(by_epoch) / 1000 + loop.moving + loop.overhead,
        "overhead": loop.overhead / seconds,
        "epochs_to_recover": (late[-1] + 1) / STEPS - job.change if late else 0.0,
        **{key: float(value) for key, value in loop.counts.items()},
    }


class _Loop:
    """A job with resharding: what `Intervals` and `Resharding` do on real ranks. step_ms: of each step, exactly;
    moving, overhead: seconds."""

    def __init__(
        self, job: SimulatedJob, planner: Planner, plan: ShardingPlan, real: bool, without: Sequence[str]
    ) -> None:
        self.job, self.plan, self.folder = job, plan, tempfile.TemporaryDirectory()
        log = DecisionLog(Path(self.folder.name) / "decisions.jsonl")
        config = AutoshardConfig(enabled=True, reshard=ReshardConfig(rollback="return" not in without))
        self.controller = Controller(config, planner, job.task(0), job.bytes_of, log)
        self.sampling = Watch(ProfileConfig(), None if "watch" in without else config.reshard.min_gain)
        self.disturbed, self.real = Disturbed(job.seed, job.world_size, real), real
        self.refusals = np.random.default_rng([job.seed, 5])
        self.step_ms: list[float] = []
        self.timed: list[np.ndarray] = []
        self.moving = self.overhead = 0.0
        self.counts = dict.fromkeys(("moves", "false", "refused", "rolled_back", "looks"), 0)

    @staticmethod
    @contextmanager
    def left_out(without: Sequence[str]) -> Iterator[None]:
        """Runs without these rules; `return` and `watch` are left out where the loop is made."""
        rules: dict[str, Any] = {
            "sure": patch.object(thresholds, "SURE", 0.5),
            "hysteresis": patch.object(History, "must_surely_save", lambda *_: 0.0),
            "look": patch.object(History, "looked", lambda *_, **__: None),
        }
        with ExitStack() as stack:
            for name in without:
                stack.enter_context(rules.get(name, nullcontext()))
            yield

    def run(self) -> None:
        stages, known = np.zeros(0), None
        self.sampling.begin(0)
        for step in range(EPOCHS * STEPS):
            epoch = step // STEPS
            if step % STEPS == 0 or self.plan is not known:
                stages, known = self.job.stages_W4(epoch, self.plan), self.plan
            self.step_ms.append(DENSE_MS + float(stages.max(axis=0).sum()))
            if step % 100 == 0:
                self.disturbed.next_moment()
            if self.sampling.is_sampled(step):
                self.timed.append(seen := self.disturbed.step(stages))
                self.overhead += SAMPLING * self.step_ms[-1] / 1000
                self.sampling.timed(step + 1)
                self.sampling.see(seen, DENSE_MS + float(seen.max(axis=0).sum()))
            whole = (step + 1) % STEPS == 0
            if whole or self.sampling.is_due(len(self.timed)):
                self._close(epoch, step + 1, early=not whole)

    def _close(self, epoch: int, step: int, *, early: bool) -> None:
        if early:
            self.timed = self.timed[-self.sampling.unusual :]
        else:
            self.sampling.ended(STEPS)
        timed, self.timed = self.timed, []
        if not timed:
            return
        self.counts["looks"] += 1
        profile = self._profile(epoch, np.stack(timed))
        throughput = 1000 * BATCH / (self.step_ms[-1] * self.disturbed.machine)
        left = EPOCHS * STEPS - step
        interval = Interval(epoch, step, profile, throughput, left, len(timed), np.stack(timed), early=early)
        old, decision = self.plan, self.controller.decide(interval, self.plan)
        self.overhead += decision.decide_seconds
        if decision.new_plan is not None:
            new = decision.new_plan
            if self.real and self.refusals.random() < REFUSED:
                self.controller.refused("rank 1 needs 6 GiB more, but has 2")
                self.counts["refused"] += 1
                decision = replace(decision, new_plan=None)
            else:
                made = [move.record(self.job.bytes_of[move.shard]) for move in old.moves_to(new)]
                seconds = MOVE_SECONDS + sum(move["bytes"] for move in made) / MOVE_BYTES_PER_SECOND
                self.controller.moved(made, seconds)
                self.plan, self.moving = new, self.moving + seconds
                self.counts["moves"] += 1
                self.counts["rolled_back"] += decision.action == "rolled_back"
                self.counts["false"] += self.job.step_ms(epoch, new) > self.job.step_ms(epoch, old)
        self.sampling.decided(step, moved=decision.new_plan is not None)

    def _profile(self, epoch: int, timed_SW4: np.ndarray) -> StepProfile:
        job = self.job
        low, middle, high = np.quantile(timed_SW4.max(axis=1).sum(axis=1), [0.25, 0.5, 0.75])
        noise = (high - low) / middle * error_of_median(len(timed_SW4))
        slow_W = np.array([job.slowdown(epoch).get(rank, 1.0) for rank in range(job.world_size)])
        return StepProfile(
            self.plan, tuple(job.pool.tables), tuple(job.stats_by_epoch[epoch]), BATCH,
            rank_costs(np.median(timed_SW4, axis=0)), "measured", float(noise),
            dense_ms=tuple(self.disturbed.dense(slow_W).tolist()),
        )  # fmt: skip
