"""A busy process takes half of one rank's core in epochs 3 to 6 of 9: what resharding recovers, and its way back.

What can be recovered is measured, not reckoned: plans made for the busy time by someone who knew of it beforehand run
under the same busy process, and the fastest of them leaves the unavoidable.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dlrm_autoshard.benchmarks.harness import paired_ratio
from dlrm_autoshard.benchmarks.loop_job import JOB, Job, run_jobs, settings
from dlrm_autoshard.benchmarks.plans_in_turns import Turn, plans_in_turns
from dlrm_autoshard.benchmarks.workloads import W_EMB
from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.replay import shards_of
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.records.epoch import EpochProfile

TITLE = "half of one rank's core is taken in epochs 3 to 6 of 9: what is recovered, and the return afterwards"
ROUGH_TIME = "6 min"

SPEEDS = (0.3, 0.4, 0.5, 0.65)
"""Of the busy rank, as who knew of it beforehand would assume: half a core, and what scheduling may make of it."""


def run(quick: bool) -> dict[str, Any]:
    # Epochs of 12 s or so: long enough for the last one to pay for the way back.
    steps, epochs, first, last, rounds = (40, 6, 2, 3, 2) if quick else (240, 9, 3, 6, 20)
    busy = tuple(range(first, last + 1))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = settings(folder, epochs=epochs, steps_per_epoch=steps, enabled=True)
        loop = run_jobs([Job("loop", config, busy)], folder)["loop"]
    by_epoch = {record.epoch: record for record in loop.epochs}
    static, ran = by_epoch[0].plan, [by_epoch[epoch] for epoch in range(first + 1, last + 1)]
    in_loop = {record.plan.fingerprint: Turn(record.plan, busy=True) for record in ran}
    known = {f"known_{speed}": Turn(plan_for(speed, loop.epochs[:first]), busy=True) for speed in SPEEDS}
    turns = {"healthy": Turn(static), "healthy_after": Turn(loop.final_plan), "static": Turn(static, busy=True)}
    turns |= in_loop | known
    by_round = plans_in_turns(JOB, turns, rounds)

    rates = {name: np.array(values) for name, values in by_round.items()}
    # The best of several noisy figures is the luckiest: each half of the rounds measures the one that the other chose.
    rates["best_known"], chosen = np.empty(rounds), []
    for half in (0, 1):
        chosen.append(max([*in_loop, *known], key=lambda name: median(rates[name][half::2])))
        rates["best_known"][1 - half :: 2] = rates[chosen[-1]][1 - half :: 2]
    # What resharding ran with in each busy epoch, at the speed of the turns, and the time it stood still for.
    stalled = sum(d["decide_seconds"] + d["move_seconds"] for d in loop.decisions if first <= d["epoch"] < last)
    training = sum((e.end_step - e.first_step) * e.batch_size / e.throughput for e in ran)
    mean_in_loop = np.mean([rates[record.plan.fingerprint] for record in ran], axis=0)
    rates["in_loop"] = mean_in_loop * training / (training + stalled)
    middle, interval = recovered(rates)
    after = paired_ratio(list(rates["healthy_after"]), list(rates["healthy"]))
    rate = {name: median(values) for name, values in rates.items()}
    return {
        "figures": {
            **{f"{name}_of_healthy": rate[name] / rate["healthy"] for name in ("static", "in_loop", "best_known")},
            "recovered": middle,
            "after_it_ended": after.median,
            "reshards": loop.moves,
            "stood_still_share": stalled / (training + stalled),
            "loop_job_of_its_healthy_epochs": loop.throughput(first + 1, last) / loop.throughput(1, first - 1),
            "healthy_epochs_of_the_loop_job": loop.throughput(1, first - 1),
            **{f"turn_{name}": value for name, value in rate.items()},
        },
        "targets": {"recovered": ">= 0.6", "after_it_ended": ">= 0.95"},
        "spread": {"recovered": interval, "after_it_ended": [after.low, after.high]},
        "notes": [
            "recovered: of what the static plan loses beyond the unavoidable, over the epochs after the one in which "
            "resharding first saw it. The unavoidable is what the best known plan loses too: the fastest of the plans "
            f"searched for a rank of speed {', '.join(map(str, SPEEDS))} and resharding's own. Each half of the rounds "
            f"measures the one that the other half chose; here {' and '.join(dict.fromkeys(chosen))}.",
            "turn_*: examples/s of all plans, on the healthy machine and beside the busy process, within one job whose "
            "tables move from one to the next (medians over the rounds). in_loop: the plans that resharding ran in "
            "those epochs, at that speed, less the time it stood still to search and move. after_it_ended: the plan "
            "that resharding went back to beside the one it had at first.",
            "loop_job_of_its_healthy_epochs: the same epochs as resharding's job ran them, beside its own healthy ones "
            "before.",
            *(f"step {d['step']}: {d['text']}" for d in loop.decisions),
        ],
    }


def plan_for(speed: float, healthy: Sequence[EpochProfile]) -> ShardingPlan:
    """Searched with costs learned from the healthy epochs, for a last rank of this speed."""
    planner, stats = Planner("search"), W_EMB.stats()
    profiles = [StepProfile(e.plan, W_EMB.tables, stats, e.batch_size, e.measured, "measured") for e in healthy]
    planner.costs.learn([shard for profile in profiles for shard in shards_of(profile)], updates=100)
    batch_size = healthy[0].batch_size
    topology = Topology(2, speed=(1.0, speed))
    return planner.plan(PlacementTask.build(W_EMB.tables, stats, topology, batch_size=batch_size)).plan


def recovered(rates: Mapping[str, np.ndarray]) -> tuple[float | None, list[float]]:
    """Part of the way from the static plan to the best known one that resharding went, by the medians over the rounds;
    and 95% of what other draws of these rounds give. None where no plan known is faster than the static one."""
    ways = np.stack([rates["in_loop"], rates["static"], rates["best_known"]])
    draws = np.random.default_rng(0).integers(0, ways.shape[1], size=(2000, ways.shape[1]))
    looped, static, best = np.median(ways, axis=1)
    some_looped, some_static, some_best = np.median(ways[:, draws], axis=2)
    sure = some_best > some_static
    if best <= static or not sure.any():
        return None, []
    low, high = np.quantile((some_looped - some_static)[sure] / (some_best - some_static)[sure], [0.025, 0.975])
    return float((looped - static) / (best - static)), [float(low), float(high)]
