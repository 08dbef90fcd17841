"""The tables' pooling factors are permuted at epoch 3 of 9: what the loop recovers, beside staying and clairvoyance."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from dlrm_autoshard.benchmarks.loop_job import Job, fixed_plan, pooling_at, run_jobs, settings
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
        plans = {
            "static": runs["loop"].epochs[0].plan,
            "in_loop": runs["loop"].final_plan,
            "clairvoyant": runs["clairvoyant"].final_plan,
        }
        rounds = 1 if quick else 4
        # In turns, so that a slow spell falls on all alike.
        again = run_jobs(
            [
                Job(f"{name}_{i}", job(1, **after, **fixed_plan(plan, folder)))
                for i in range(rounds)
                for name, plan in plans.items()
            ],
            folder,
        )
    rate = {name: median(again[f"{name}_{i}"].throughput(0) for i in range(rounds)) for name in plans}
    loop_run = runs["loop"]
    return {
        "figures": {
            **rate,
            "of_clairvoyant": rate["in_loop"] / rate["clairvoyant"],
            "static_of_clairvoyant": rate["static"] / rate["clairvoyant"],
            "loop_job_since_the_drift": loop_run.throughput(at),
            "loop_job_at_the_end": loop_run.throughput(epochs - 2),
            "clairvoyant_job": runs["clairvoyant"].throughput(2),
            "reshards": loop_run.moves,
        },
        "targets": {"of_clairvoyant": ">= 0.9"},
        "notes": [
            "static, in_loop, clairvoyant: the plan of before the drift, the one the loop ended with, and that of a "
            "job planned for the drifted data from the start, with the loop on; measured in turns on the drifted data "
            "(medians). loop_job_*: as the loop's job ran, minutes earlier; since_the_drift counts the epoch in which "
            "it could not know yet.",
            *runs["loop"].texts,
        ],
    }
