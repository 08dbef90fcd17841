"""Nothing changes: resharding must leave everything alone, and cost next to nothing."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from dlrm_autoshard.benchmarks.harness import Findings
from dlrm_autoshard.benchmarks.loop_job import Job, fixed_plan, profiling_seconds, run_jobs, settings, start_seconds
from dlrm_autoshard.benchmarks.paired import median_with_interval
from dlrm_autoshard.costs import PLANNED_STAGES as STAGES
from dlrm_autoshard.records.interval import IntervalProfile

TITLE = "nothing changes: moves in 10 epochs (none wanted), and resharding's part of the whole job's time"
ROUGH_TIME = "3 min"

STARTS = 5


def run(quick: bool) -> dict[str, Any]:
    epochs, steps = (3, 70) if quick else (10, 240)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        loop = settings(folder, epochs=epochs, steps_per_epoch=steps, profile={}, enabled=True)
        runs = run_jobs([Job("loop", loop)], folder)
        job = runs["loop"]
        static = settings(folder, epochs=2, steps_per_epoch=steps, profile={}, **fixed_plan(job.final_plan, folder))
        beside = run_jobs([Job("static", static)], folder)["static"]
        longer = [
            start_seconds(Job(f"planned_{n}", loop), folder) - start_seconds(Job(f"given_{n}", static), folder)
            for n in range(1 if quick else STARTS)
        ]
    errors, planning = job.profile_errors, median_with_interval(longer)
    whole = job.start_seconds + job.seconds + job.loop_seconds
    timed = [epoch for epoch in job.epochs if epoch.samples]  # what a noticed change leaves of an epoch may have none
    by_itself = [difference(before, after) for before, after in pairwise(timed) if before.plan == after.plan]
    found = Findings()
    found.put("moves", job.moves, "== 0")
    overhead = planning.map(lambda seconds: (seconds + profiling_seconds(job.epochs) + job.loop_seconds) / whole)
    found.put("overhead", overhead, "<= 0.01")
    found.put("planning_at_start_seconds", planning)
    found.put("profiling_seconds", profiling_seconds(job.epochs))
    found.put("loop_seconds", job.loop_seconds)
    found.put("training_seconds", job.seconds)
    found.put("in_loop", job.throughput(1))
    found.put("static", beside.throughput(0))
    found.put("next_epoch_error_first", errors[0] if errors else None)
    later = median_with_interval(errors[3:] or errors[-1:]) if errors else None
    found.put("next_epoch_error", later, "<= 0.05")
    found.put("epochs_differ_by_themselves", median(by_itself) if by_itself else None)
    found.notes = [
        "overhead: of the whole job, its start included: by how much longer a planned job takes to its first step "
        "than one with a plan file (whose interval it has), by how much sampled steps are longer than others "
        "(profiling at its defaults), and the time for which training stood still to decide and move.",
        f"planning_at_start_seconds: the median of {len(longer)} pairs of starts. Until d92c550 of one pair, "
        "whose planned job paid 1 s for reading the package from disk (1.7 s, overhead 1.9%, then).",
        "next_epoch_error: sum of |predicted - measured| over sum of measured, all ranks' four stages, before the "
        "model has seen the epoch; median over epochs 3 to 9. epochs_differ_by_themselves: the same measure of "
        "one epoch taken for a prediction of the next, the plan unchanged (median): what the machine allows.",
        *(f"step {d['step']}: {d['text']}{error_said(d['error_before'])}" for d in job.decisions),
    ]
    return vars(found)


def error_said(error: float | None) -> str:
    """Nothing of an interval in which too few steps were timed."""
    return "" if error is None else f" (error {error:.1%})"


def difference(before: IntervalProfile, after: IntervalProfile) -> float:
    """Returns the mean relative difference of two intervals' stage times."""
    pairs = [(b.stage(s), a.stage(s)) for b, a in zip(before.measured, after.measured, strict=True) for s in STAGES]
    return sum(abs(b - a) for b, a in pairs) / sum(a for _, a in pairs)
