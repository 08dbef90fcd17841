"""A busy process takes half of one rank's core in epochs 3 to 6 of 9: what resharding recovers, and its way back.

What can be recovered is measured, not reckoned: plans made for the busy time by someone who knew of it beforehand run
under the same busy process, and the fastest of them leaves the unavoidable.
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
"""An epoch, fixed: 12 s or so. What is recovered grows with it, so it is no knob."""
SPEEDS = (0.3, 0.4, 0.5, 0.65)
"""Speeds of the busy rank, as an oracle would assume: half a core, and what scheduling may make of it."""


def run(quick: bool) -> dict[str, Any]:
    steps, epochs, first, last, rounds = (24, 6, 2, 3, 2) if quick else (STEPS, 9, 3, 6, 20)
    busy = tuple(range(first, last + 1))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = settings(folder, epochs=epochs, steps_per_epoch=steps, enabled=True)
        loop = run_jobs([Job("loop", config, busy)], folder)["loop"]
    ran, after = plans_of(loop.epochs, busy), plans_of(loop.epochs, [last + 1])
    static = loop.epochs[0].plan
    in_loop = {plan.fingerprint: Turn(plan, busy=True) for plan, _ in ran}
    afterwards = {f"after_{plan.fingerprint}": Turn(plan) for plan, _ in after}
    known = {f"known_{speed}": Turn(plan_for(speed, loop.epochs[:first]), busy=True) for speed in SPEEDS}
    turns = {"healthy": Turn(static), "healthy_after": Turn(loop.final_plan)}
    turns |= {"static": Turn(static, busy=True)} | in_loop | afterwards | known
    rates = plans_interleaved(JOB, turns, rounds)
    rates["best_known"], chosen = best_of(rates, [*in_loop, *known])
    stalled = sum(d["decide_seconds"] + d["move_seconds"] for d in loop.decisions if first <= d["epoch"] <= last + 1)
    busy_steps = len(busy) * steps

    def whole(parts: Sequence[tuple[str, int]], lost: float = 0.0) -> list[float]:
        """Examples/s over all busy epochs and the first one after, by round; parts: turns, each for so many steps."""
        rate_PR = np.array([rates[name] for name, _ in parts])
        samples_P = np.array([JOB.batch_size * count for _, count in parts])
        by_round: np.ndarray = samples_P.sum() / (lost + (samples_P[:, None] / rate_PR).sum(axis=0))
        return [float(value) for value in by_round]

    rate = {name: median(values) for name, values in rates.items()}
    rates["three_quarters"] = [0.75 * value for value in rates["healthy"]]
    in_busy = [(plan.fingerprint, count) for plan, count in ran]
    looped = whole([*in_busy, *((f"after_{plan.fingerprint}", count) for plan, count in after)], stalled)
    stayed = whole([("static", busy_steps), ("healthy", steps)])
    best = whole([("best_known", busy_steps), ("healthy", steps)])
    three_quarters = whole([("three_quarters", busy_steps), ("healthy", steps)])
    found = Findings()
    found.put("static_of_healthy", rate["static"] / rate["healthy"])
    found.put("best_known_of_healthy", rate["best_known"] / rate["healthy"])
    found.put("recovered", recovered(looped, stayed, best), ">= 0.6")
    found.put("recovered_of_0.75_healthy", recovered(looped, stayed, three_quarters), ">= 0.6")
    found.put("after_it_ended", paired_ratio(rates["healthy_after"], rates["healthy"]), ">= 0.95")
    found.put("reshards", loop.moves)
    found.put("stood_still_seconds", stalled)
    found.put("loop_job_of_its_healthy_epochs", loop.throughput(first, last) / loop.throughput(1, first - 1))
    found.put("healthy_epochs_of_the_loop_job", loop.throughput(1, first - 1))
    for name, value in rate.items():
        found.put(f"turn_{name}", value)
    found.notes = [
        "recovered: of what the static plan loses beyond the unavoidable, over all busy epochs, the steps before "
        "the loop could know included, and the first epoch after, with the time for which resharding stood still. "
        "The unavoidable is what the best known plan loses too: the fastest of the plans "
        f"searched for a rank of speed {', '.join(map(str, SPEEDS))} and resharding's own. Each half of the rounds "
        f"measures the one that the other half chose; here {' and '.join(dict.fromkeys(chosen))}.",
        "turn_*: examples/s of all plans, on the healthy machine and beside the busy process, within one job whose "
        "tables move from one to the next (medians over the rounds). after_it_ended: the plan that resharding went "
        "back to beside the one it had at first.",
        "recovered_of_0.75_healthy: the same where 0.75 of the healthy speed is taken for what can be had.",
        "loop_job_of_its_healthy_epochs: the same epochs as resharding's job ran them, beside its own healthy ones "
        "before.",
        *(f"step {d['step']}: {d['text']}" for d in loop.decisions),
    ]
    return vars(found)


def plans_of(intervals: Sequence[IntervalProfile], epochs: Sequence[int]) -> list[tuple[ShardingPlan, int]]:
    """The plans of these epochs, each with the number of steps that ran under it."""
    found: dict[str, tuple[ShardingPlan, int]] = {}
    for interval in intervals:
        if interval.epoch in epochs:
            _, before = found.get(interval.plan.fingerprint, (interval.plan, 0))
            found[interval.plan.fingerprint] = interval.plan, before + interval.end_step - interval.first_step
    return list(found.values())


def plan_for(speed: float, healthy: Sequence[IntervalProfile]) -> ShardingPlan:
    """Searched with costs learned from the healthy epochs, for a last rank of this speed."""
    planner, stats = Planner("search"), W_EMB.stats()
    profiles = [StepProfile(e.plan, W_EMB.tables, stats, e.batch_size, e.measured, "measured") for e in healthy]
    planner.costs.learn([shard for profile in profiles for shard in shards_of(profile)], updates=100)
    batch_size = healthy[0].batch_size
    topology = Topology(2, speed=(1.0, speed))
    return planner.plan(PlacementTask.build(W_EMB.tables, stats, topology, batch_size=batch_size)).plan
