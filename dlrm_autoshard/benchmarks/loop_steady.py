"""Nothing changes: how often resharding moves tables all the same, and what share of a job it takes.

Its overhead has three parts: a planned job's start takes longer than that of a job with a plan file, sampled steps take
longer than others (profiling at its defaults), and training stands still to decide and move.
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from dlrm_autoshard.benchmarks.harness import Findings
from dlrm_autoshard.benchmarks.loop_job import Job, fixed_plan, profiling_seconds, run_jobs, settings, start_seconds
from dlrm_autoshard.benchmarks.paired import median_with_interval
from dlrm_autoshard.costs import PLANNED_STAGES
from dlrm_autoshard.records.interval import IntervalProfile

TITLE = "nothing changes: moves in 10 epochs (none wanted), and resharding's share of the whole job's time"
ROUGH_TIME = "3 min"
STARTS = 5


def run(quick: bool) -> dict[str, Any]:
    epochs, steps = (3, 70) if quick else (10, 240)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = settings(folder, epochs=epochs, steps_per_epoch=steps, profile={}, enabled=True)
        loop = run_jobs([Job("loop", config)], folder)["loop"]
        static = settings(
            folder, epochs=epochs, steps_per_epoch=steps, profile={}, **fixed_plan(loop.final_plan, folder)
        )
        planning = median_with_interval(
            [
                start_seconds(Job(f"planned_{n}", config), folder) - start_seconds(Job(f"given_{n}", static), folder)
                for n in range(1 if quick else STARTS)
            ]
        )
    profiling, whole = profiling_seconds(loop.epochs), loop.start_seconds + loop.seconds + loop.stopped_seconds
    timed = [epoch for epoch in loop.epochs if epoch.samples]  # the rest of an epoch after a change may have none
    by_itself = [difference(before, after) for before, after in pairwise(timed) if before.plan == after.plan]
    errors = [d["error_before"] for d in loop.decisions if d.get("error_before") is not None]
    found = Findings()
    found.put("moves", loop.moves, "== 0")
    overhead = planning.map(lambda seconds: (seconds + profiling + loop.stopped_seconds) / whole)
    found.put("overhead", overhead, "<= 0.01")
    found.put("planning_at_start_seconds", planning)
    found.put("profiling_seconds", profiling)
    found.put("loop_seconds", loop.stopped_seconds)
    found.put("training_seconds", loop.seconds)
    later = median_with_interval(errors[3:] or errors[-1:]) if errors else None
    found.put("next_epoch_error", later, "<= 0.05")
    found.put("epochs_differ_by_themselves", median(by_itself) if by_itself else None)
    found.notes = [
        "overhead: its interval is that of the pairs of starts",
        "next_epoch_error: sum of |predicted - measured| over sum of measured, four stages of all ranks, before the "
        "model has seen the epoch; epochs_differ_by_themselves: the same of one epoch taken for the next under the "
        "same plan, which no prediction can beat",
        *loop.texts(),
    ]
    return vars(found)


def difference(before: IntervalProfile, after: IntervalProfile) -> float:
    """Returns the mean relative difference of two intervals' stage times."""
    pairs = [
        (one.stage(stage), other.stage(stage))
        for stage in PLANNED_STAGES
        for one, other in zip(before.measured, after.measured, strict=True)
    ]
    return sum(abs(one - other) for one, other in pairs) / sum(other for _, other in pairs)
