"""A busy process takes half of one rank's core in epochs 3 to 6 of 9: what resharding recovers, and its way back.

What can be recovered is measured: plans searched for a slow last rank run beside the same busy process, and the fastest
of these and of resharding's own is the best plan known. `recovered` counts all busy epochs, the steps before resharding
could know included, the first epoch after them, and the seconds for which resharding stopped training.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dlrm_autoshard.benchmarks.harness import Findings
from dlrm_autoshard.benchmarks.loop_job import JOB, Job, run_jobs, settings
from dlrm_autoshard.benchmarks.paired import paired_ratio
from dlrm_autoshard.benchmarks.plans_interleaved import Turn, best_of, plans_interleaved, recovered
from dlrm_autoshard.benchmarks.workloads import W_EMB
from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.costs.replay import shards_of
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.records.interval import IntervalProfile

TITLE = "half of one rank's core is taken in epochs 3 to 6 of 9: what is recovered, and the return afterwards"
ROUGH_TIME = "6 min"
STEPS = 240
"""Steps of an epoch, about 12 s. What is recovered grows with it, so it is fixed."""
SPEEDS = (0.3, 0.4, 0.5, 0.65)
"""Speeds that an oracle may assume of the busy rank: half a core, and what scheduling may make of it."""


def run(quick: bool) -> dict[str, Any]:
    steps, epochs, first, last, rounds = (24, 6, 2, 3, 2) if quick else (STEPS, 9, 3, 6, 20)
    busy = tuple(range(first, last + 1))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = settings(folder, epochs=epochs, steps_per_epoch=steps, enabled=True)
        loop = run_jobs([Job("loop", config, busy)], folder)["loop"]
    static, ran, after = loop.epochs[0].plan, plans_of(loop.epochs, busy), plans_of(loop.epochs, [last + 1])
    in_loop = {plan.fingerprint: Turn(plan, busy=True) for plan, _ in ran}
    known = {f"known_{speed}": Turn(plan_for(speed, loop.epochs[:first]), busy=True) for speed in SPEEDS}
    turns = {"healthy": Turn(static), "healthy_after": Turn(loop.final_plan), "static": Turn(static, busy=True)}
    turns |= in_loop | {f"after_{plan.fingerprint}": Turn(plan) for plan, _ in after} | known
    rates = plans_interleaved(JOB, turns, rounds)
    rates["best_known"], chosen = best_of(rates, [*in_loop, *known])
    stopped = sum(d["decide_seconds"] + d["move_seconds"] for d in loop.decisions if first <= d["epoch"] <= last + 1)

    def whole(parts: Sequence[tuple[str, int]], lost: float = 0.0) -> list[float]:
        """Returns examples/s over the busy epochs and the one after, by round. parts: turns and their steps."""
        rate_PR = np.array([rates[name] for name, _ in parts])
        samples_P = np.array([JOB.batch_size * count for _, count in parts])
        by_round: np.ndarray = samples_P.sum() / (lost + (samples_P[:, None] / rate_PR).sum(axis=0))
        return [float(value) for value in by_round]

    in_busy = [(plan.fingerprint, count) for plan, count in ran]
    looped = whole([*in_busy, *((f"after_{plan.fingerprint}", count) for plan, count in after)], stopped)
    stayed = whole([("static", len(busy) * steps), ("healthy", steps)])
    best = whole([("best_known", len(busy) * steps), ("healthy", steps)])
    rate, found = {name: median(values) for name, values in rates.items()}, Findings()
    found.put("static_of_healthy", rate["static"] / rate["healthy"])
    found.put("best_known_of_healthy", rate["best_known"] / rate["healthy"])
    found.put("recovered", recovered(looped, stayed, best), ">= 0.6")
    found.put("after_it_ended", paired_ratio(rates["healthy_after"], rates["healthy"]), ">= 0.95")
    found.put("reshards", loop.moves)
    found.put("stopped_seconds", stopped)
    for name, value in rate.items():
        found.put(f"turn_{name}", value)
    found.notes = [
        f"best_known: each half of the rounds measures the plan that was fastest in the other ({', '.join(chosen)})",
        "turn_*: median examples/s under each plan, on the healthy machine or beside the busy process, interleaved "
        "within one job; after_it_ended: the plan that resharding returned to over the one it had at first",
        *loop.texts(),
    ]
    return vars(found)


def plans_of(intervals: Sequence[IntervalProfile], epochs: Sequence[int]) -> list[tuple[ShardingPlan, int]]:
    """Returns the plans of these epochs, each with the number of steps that ran under it."""
    found: dict[str, tuple[ShardingPlan, int]] = {}
    for interval in intervals:
        if interval.epoch in epochs:
            _, before = found.get(interval.plan.fingerprint, (interval.plan, 0))
            found[interval.plan.fingerprint] = interval.plan, before + interval.end_step - interval.first_step
    return list(found.values())


def plan_for(speed: float, healthy: Sequence[IntervalProfile]) -> ShardingPlan:
    """Searches a plan for a last rank of this speed, with costs learned from the healthy epochs."""
    planner, stats = Planner("search"), W_EMB.stats()
    profiles = [StepProfile(e.plan, W_EMB.tables, stats, e.batch_size, e.measured, "measured") for e in healthy]
    planner.costs.learn([shard for profile in profiles for shard in shards_of(profile)], updates=100)
    topology = Topology(2, speed=(1.0, speed))
    return planner.plan(PlacementTask.build(W_EMB.tables, stats, topology, batch_size=healthy[0].batch_size)).plan
