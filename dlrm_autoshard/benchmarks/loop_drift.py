"""The tables' pooling factors are permuted at epoch 3 of 9: what the loop recovers, beside staying and clairvoyance."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from dlrm_autoshard.benchmarks.harness import paired_ratio
from dlrm_autoshard.benchmarks.loop_job import JOB, Job, pooling_at, run_jobs, settings
from dlrm_autoshard.benchmarks.plans_in_turns import Turn, plans_in_turns
from dlrm_autoshard.config import Config

TITLE = "pooling factors permuted at epoch 3 of 9: throughput after it static, with the loop, and re-planned at once"
ROUGH_TIME = "3 min"


def run(quick: bool) -> dict[str, Any]:
    steps, epochs, at = (24, 6, 2) if quick else (60, 9, 3)
    drift = [{"epoch": at, "permute_pooling": True, "move_hot_ids": False}]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def job(epochs: int, **options: Any) -> Config:
            return settings(folder, epochs=epochs, steps_per_epoch=steps, **options)

        loop = job(epochs, drift=drift, enabled=True)
        runs = run_jobs([Job("loop", loop)], folder)
        # What comes after the drift, from the start: planned and probed for it.
        after = {"pooling": pooling_at(loop, at)}
        runs |= run_jobs([Job("clairvoyant", job(3, **after, enabled=True))], folder)
    turns = {
        "static": Turn(runs["loop"].epochs[0].plan),
        "in_loop": Turn(runs["loop"].final_plan),
        "clairvoyant": Turn(runs["clairvoyant"].final_plan),
    }
    rates = plans_in_turns(replace(JOB, pooling=tuple(after["pooling"])), turns, 2 if quick else 30)
    of_clairvoyant = paired_ratio(rates["in_loop"], rates["clairvoyant"])
    static_of_clairvoyant = paired_ratio(rates["static"], rates["clairvoyant"])
    loop_run = runs["loop"]
    return {
        "figures": {
            **{name: median(values) for name, values in rates.items()},
            "of_clairvoyant": of_clairvoyant.median,
            "static_of_clairvoyant": static_of_clairvoyant.median,
            "loop_job_since_the_drift": loop_run.throughput(at),
            "loop_job_at_the_end": loop_run.throughput(epochs - 2),
            "clairvoyant_job": runs["clairvoyant"].throughput(2),
            "reshards": loop_run.moves,
        },
        "targets": {"of_clairvoyant": ">= 0.9"},
        "spread": {
            "of_clairvoyant": [of_clairvoyant.low, of_clairvoyant.high],
            "static_of_clairvoyant": [static_of_clairvoyant.low, static_of_clairvoyant.high],
        },
        "notes": [
            "static, in_loop, clairvoyant: the plan of before the drift, the one the loop ended with, and that of a "
            "job planned for the drifted data from the start, with the loop on; examples/s on the drifted data within "
            "one job whose tables move from plan to plan (medians over the rounds, ratios paired). loop_job_*: as the "
            "loop's job ran, minutes earlier; since_the_drift counts the epoch in which it could not know yet.",
            *runs["loop"].texts,
        ],
    }
