"""The tables' pooling factors are permuted at epoch 3 of 9: what the loop recovers, beside staying and clairvoyance."""

from __future__ import annotations

import tempfile
from pathlib import Path
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
        # What comes after the drift, from the start: with the plan from before it, and planned and probed for it.
        after = {"pooling": pooling_at(loop, at)}
        static = job(2, **after, **fixed_plan(runs["loop"].epochs[0].plan, folder))
        clairvoyant = job(3, **after, enabled=True)
        runs |= run_jobs([Job("static", static), Job("clairvoyant", clairvoyant)], folder)
    best = runs["clairvoyant"].throughput(2)
    since, settled = runs["loop"].throughput(at), runs["loop"].throughput(epochs - 2)
    return {
        "figures": {
            "static": runs["static"].throughput(0),
            "in_loop_since_the_drift": since,
            "in_loop_at_the_end": settled,
            "clairvoyant": best,
            "of_clairvoyant": settled / best,
            "of_clairvoyant_since_the_drift": since / best,
            "reshards": runs["loop"].moves,
        },
        "targets": {"of_clairvoyant": ">= 0.9"},
        "notes": [
            "of_clairvoyant: over the last two epochs; since_the_drift counts the epoch in which the loop could not "
            "know yet. Clairvoyant: planned for the drifted data from the start, with the loop on; its third epoch.",
            *runs["loop"].texts,
        ],
    }
