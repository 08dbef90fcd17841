"""The race at scale, in simulation: the real controller and planner, 200 tables, 8 and 64 ranks that are arithmetic.

Shard costs are measured fbgemm costs, interpolated; recorded_cluster.py says how. The worlds are `bench race`'s. The
clairvoyant has a planner of its own, starts anew at each change and moves for nothing. Seconds are simulated, planning
and deciding take none; how far a search gets depends on this machine.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dlrm_autoshard.autoshard.controller import Controller
from dlrm_autoshard.autoshard.decision import Interval
from dlrm_autoshard.benchmarks.harness import Findings
from dlrm_autoshard.benchmarks.paired import median_with_interval
from dlrm_autoshard.benchmarks.race_worlds import WORLDS, WorldName
from dlrm_autoshard.benchmarks.recorded_cluster import RecordedCluster
from dlrm_autoshard.benchmarks.slices import in_slices, origins
from dlrm_autoshard.config import AutoshardConfig
from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import start_costs
from dlrm_autoshard.records.decisions import DecisionLog
from dlrm_autoshard.tables import TableConfig, TableStats

TITLE = "resharding on 8 and 64 simulated ranks, 200 tables, six worlds: share recovered, false moves, time to recover"
ROUGH_TIME = "1.5 h on two cores; goes on where it was stopped (quick: 1 min)"
EPOCHS, STEPS, INTERVALS, BATCH, DENSE_MS = 12, 400, 4, 8192, 2.0
LEAST_GAIN, RECOVERED_WITHIN, MATTERS = 0.05, 0.02, 0.01
MOVE_SECONDS, MOVE_BYTES_PER_SECOND = 0.1, 1e9


def run(quick: bool) -> dict[str, Any]:
    sizes, worlds, seeds, tables = ((8,), WORLDS[1:2], 1, 40) if quick else ((8, 64), WORLDS, 20, 200)
    rows = in_slices(
        None if quick else Path("runs/race-simulated/rows.jsonl"),
        [(world, seed, size, tables) for seed in range(seeds) for size in sizes for world in worlds],
        simulate,
        workers=0 if quick else os.cpu_count() or 1,
    )
    return {**summarise(rows, sizes, worlds, seeds), **origins(rows)}


def summarise(
    rows: Sequence[Mapping[str, Any]], sizes: Sequence[int], worlds: Sequence[WorldName], seeds: int
) -> dict[str, Any]:
    """Figures, targets, spread, notes. rows: of `simulate`, with its world, seed, ranks and tables as `of`."""
    found = Findings()
    found.notes = [
        "simulated: no rank runs. Shards cost what recorded fbgemm shards did, interpolated; exchanges by a formula.",
        f"resharding decides {INTERVALS} times an epoch.",
        "searches end when the job's time for them does, on the machine that simulates: two runs of one job (gradual, "
        "8 ranks, seed 0) recovered 0.39 and 0.52.",
        f"Where nothing moved, and a clairvoyant gains less than {MATTERS:.0%} too, a worst job has no target.",
        f"recovered: over jobs in which the clairvoyant gains {LEAST_GAIN:.0%} or more over the plan of the start.",
        f"a false move: one after which a step takes longer, exactly; recovered within {RECOVERED_WITHIN:.0%} of the "
        "clairvoyant's step.",
    ]
    seeds_done = seeds
    for size, world in itertools.product(sizes, worlds):
        cell, jobs = f"{size} ranks, {world}", [row for row in rows if row["of"][0] == world and row["of"][2] == size]
        gainful = [job for job in jobs if job["gain"] >= LEAST_GAIN]
        if any(job["moves"] or abs(job["gain"]) >= MATTERS for job in jobs) or not jobs:
            found.targets[f"{cell}: worst job, loop on / static"] = "<= 1.02"
        if gainful or (not jobs and world not in ("calm", "tight")):
            found.targets[f"{cell}: recovered"] = ">= 0.6" if world == "straggler" else ">= 0.8"
        seeds_done = min(seeds_done, len(jobs))
        if len(jobs) < seeds:
            found.notes.append(f"{cell}: {len(jobs)} of {seeds} seeds")
        if not jobs:
            continue
        ratios = [job["loop"] / job["static"] for job in jobs]
        for name, values in (
            ("clairvoyant's gain", [job["gain"] for job in jobs]),
            ("loop on / static", ratios),
            ("recovered", [job["recovered"] for job in gainful]),
            ("epochs to recover", [job["epochs_to_recover"] for job in gainful]),
        ):
            if values:
                found.put(f"{cell}: {name}", median_with_interval(values))
        found.put(f"{cell}: moves, false ones, a job", [fmean(job[k] for job in jobs) for k in ("moves", "false")])
        found.put(f"{cell}: worst job, loop on / static", max(ratios))
    found.put("seeds", seeds_done, f">= {seeds}")
    return vars(found)


@dataclass(frozen=True)
class SimulatedWorld:
    name: WorldName
    seed: int
    world_size: int
    num_tables: int

    def stats_by_epoch(self, stats: Sequence[TableStats]) -> list[list[TableStats]]:
        draw = np.random.default_rng([WORLDS.index(self.name), self.seed])
        other = draw.permutation(len(stats))
        by_epoch = []
        for epoch in range(EPOCHS):
            part = {"abrupt": 1.0, "hot-ids": 1.0, "gradual": 0.5 * epoch / (EPOCHS - 1)}.get(self.name, 0.0)
            if self.name != "gradual" and epoch < self.change:
                part = 0.0
            if self.name == "hot-ids":  # other rows are hot, and more or fewer of them
                hot = [stats[o] for o in other] if part else stats
                by_epoch.append(
                    [
                        replace(s, mean_reuse=o.mean_reuse, reuse_histogram=o.reuse_histogram)
                        for s, o in zip(stats, hot, strict=True)
                    ]
                )
                continue
            now, later = np.log([s.mean_pooling for s in stats]), np.log([stats[o].mean_pooling for o in other])
            pooling = np.exp((1 - part) * now + part * later)
            by_epoch.append([replace(s, mean_pooling=float(p)) for s, p in zip(stats, pooling, strict=True)])
        return by_epoch

    @property
    def change(self) -> int:
        return int(np.random.default_rng([self.seed, 7]).integers(EPOCHS // 4, EPOCHS // 2 + 1))

    def slowdown(self, epoch: int) -> dict[int, float]:
        """Of one rank, whichever."""
        busy = self.name == "straggler" and self.change <= epoch < self.change + EPOCHS // 3
        rank = int(np.random.default_rng([self.seed, 8]).integers(self.world_size))
        return {rank: 2.0} if busy else {}

    def memory_bytes(self, tables: Sequence[TableConfig]) -> tuple[int, ...] | None:
        """Of a tight world, a fiftieth more than the fullest rank needs where tables are placed largest first."""
        if self.name != "tight":
            return None
        loads = [0] * self.world_size
        for size in sorted((table.weight_bytes for table in tables), reverse=True):
            loads[loads.index(min(loads))] += size
        return (round(1.02 * max(loads)),) * self.world_size


def simulate(name: WorldName, seed: int, world_size: int, num_tables: int) -> dict[str, float]:
    """One job's seconds under each arm, and what resharding did."""
    world = SimulatedWorld(name, seed, world_size, num_tables)
    pool = synthetic_pool(world.num_tables, seed=1000 + world.seed, batch_size=BATCH)
    by_epoch = world.stats_by_epoch(pool.stats)
    cluster = RecordedCluster(pool.tables, world.seed)
    bytes_of = {table.name: table.weight_bytes for table in pool.tables}

    def task(epoch: int, speed: tuple[float, ...] | None = None) -> PlacementTask:
        topology = Topology(world.world_size, memory_bytes=world.memory_bytes(pool.tables), speed=speed)
        return PlacementTask.build(pool.tables, by_epoch[epoch], topology, batch_size=BATCH, table_bytes=bytes_of)

    def planned(epoch: int, seed: int) -> tuple[Planner, ShardingPlan]:
        """As a job starts: calibrated, finalists measured on the ranks. A busy rank's speed is known."""
        stats, slow = by_epoch[epoch], world.slowdown(epoch)
        cluster.slowdown = slow
        planner = Planner(seed=seed)
        start_costs(
            planner,
            task(epoch),
            fingerprint={},
            measure_shards=lambda shards: cluster.measure_shards(stats, BATCH, shards),
            seed=seed,
        )
        speed = tuple(1 / slow.get(rank, 1.0) for rank in range(world.world_size)) if slow else None

        def measure(plans: Sequence[ShardingPlan]) -> list[StepProfile]:
            return [cluster.profile(stats, plan, BATCH) for plan in plans]

        return planner, planner.plan(task(epoch, speed), measure=measure).plan

    def step_ms(epoch: int, plan: ShardingPlan) -> float:
        cluster.slowdown = world.slowdown(epoch)
        return DENSE_MS + cluster.step_ms(by_epoch[epoch], plan, BATCH)

    planner, start = planned(0, world.seed)
    best, clairvoyant = start, []
    for epoch in range(EPOCHS):
        now = (by_epoch[epoch], world.slowdown(epoch))
        if epoch and now != (by_epoch[epoch - 1], world.slowdown(epoch - 1)):
            _, plan = planned(epoch, world.seed + 1)
            best = min((best, start, plan), key=lambda p: step_ms(epoch, p))
        clairvoyant.append(step_ms(epoch, best))
    clairvoyant = [ms for ms in clairvoyant for _ in range(INTERVALS)]
    static = [step_ms(epoch, start) for epoch in range(EPOCHS) for _ in range(INTERVALS)]
    looped, moves, false, moving = _loop(world, planner, start, task(0), bytes_of, cluster, by_epoch, step_ms)
    steps = STEPS / INTERVALS / 1000
    totals = {n: steps * sum(ms) for n, ms in {"static": static, "best": clairvoyant, "loop": looped}.items()}
    totals["loop"] += moving
    gap = totals["static"] - totals["best"]
    slower = [ours > (1 + RECOVERED_WITHIN) * theirs for ours, theirs in zip(looped, clairvoyant, strict=True)]
    late = [number for number in range(world.change * INTERVALS, len(looped)) if slower[number]]
    return {
        **totals,
        "gain": gap / totals["static"],
        "recovered": (totals["static"] - totals["loop"]) / gap if gap > 0 else 0.0,
        "epochs_to_recover": (late[-1] + 1) / INTERVALS - world.change if late else 0.0,
        "moves": float(moves),
        "false": float(false),
    }


def _loop(
    world: SimulatedWorld,
    planner: Planner,
    plan: ShardingPlan,
    task: PlacementTask,
    bytes_of: dict[str, int],
    cluster: RecordedCluster,
    by_epoch: list[list[TableStats]],
    step_ms: Any,
) -> tuple[list[float], int, int, float]:
    """Step by interval in ms, moves, false moves, and the seconds that moves took."""
    noise = np.random.default_rng([world.seed, 9])
    looped, moves, false, moving = [], 0, 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        log = DecisionLog(Path(folder) / "decisions.jsonl")
        controller = Controller(AutoshardConfig(enabled=True), planner, task, bytes_of, log)
        for interval in range(EPOCHS * INTERVALS):
            epoch = interval // INTERVALS
            looped.append(step_ms(epoch, plan))
            throughput = 1000 * BATCH / (looped[-1] * float(np.exp(0.5 * cluster.noise * noise.standard_normal())))
            profile = cluster.profile(by_epoch[epoch], plan, BATCH)
            done = (interval + 1) * STEPS // INTERVALS
            now = Interval(epoch, done, profile, throughput, EPOCHS * STEPS - done)
            decision = controller.decide(now, plan)
            if decision.new_plan is None:
                continue
            made = [move.record(bytes_of[move.table]) for move in plan.moves_to(decision.new_plan)]
            seconds = MOVE_SECONDS + sum(move["bytes"] for move in made) / MOVE_BYTES_PER_SECOND
            controller.moved(made, seconds)
            moves, moving = moves + 1, moving + seconds
            false += step_ms(epoch, decision.new_plan) > step_ms(epoch, plan)
            plan = decision.new_plan
    return looped, moves, false, moving
