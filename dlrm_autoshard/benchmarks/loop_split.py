"""A table becomes dominant at epoch 2 of 7: is it split live, and how near is that to having known it from the start?

The tables of `bench splits`: 26 on 2 ranks, one of dim 128 that then has half of all lookups. The job may split tables
and decides after each epoch, and within one when its data have changed; the oracle is a job on the drifted data
from the start, and for as long as the other trains on them.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from dlrm_autoshard.benchmarks.harness import Findings
from dlrm_autoshard.benchmarks.loop_job import MANY_SAMPLES, Job, run_jobs
from dlrm_autoshard.benchmarks.paired import paired_ratio
from dlrm_autoshard.benchmarks.plans_interleaved import WORLD_SIZE, Turn, plans_interleaved, recovered
from dlrm_autoshard.benchmarks.splits import DOMINANT, dominated
from dlrm_autoshard.benchmarks.workloads import Workload, drawn
from dlrm_autoshard.config import Config, TablesConfig, parse_config
from dlrm_autoshard.data.batch import Batch, Split

TITLE = "a table becomes dominant in mid-run: split live, against a plan made for it from the start"
ROUGH_TIME = "5 min"
BATCH, NUM_BATCHES = 1024, 8
BEFORE = 6
"""The table's ids a sample, as long as it is one of many."""


def run(quick: bool) -> dict[str, Any]:
    steps, epochs, at = (100, 5, 1) if quick else (240, 7, 2)
    workload = replace(dominated(), batch_size=BATCH, num_batches=NUM_BATCHES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        jobs = {
            "loop": _job(workload, folder, steps, epochs, at),
            "oracle": _job(workload, folder, steps, epochs - at, 0),
        }
        loop, oracle = (run_jobs([Job(name, job)], folder)[name] for name, job in jobs.items())
    static = next(epoch.plan for epoch in loop.epochs if epoch.epoch == at)
    turns = {
        "static": Turn(static),
        "in_loop": Turn(loop.final_plan),
        "planned_anew": Turn(oracle.epochs[0].plan),
        "oracle": Turn(oracle.final_plan),
    }
    rates = plans_interleaved(workload, turns, 2 if quick else 24)
    name = workload.tables[DOMINANT].name
    looks = [d for d in loop.decisions if d["step"] > at * steps]
    moved = [number for number, d in enumerate(looks, 1) if d["action"] == "moved"]
    intervals = math.ceil(looks[moved[-1] - 1]["step"] / steps) - at if moved else None
    found = Findings()
    for turn, values in rates.items():
        found.put(turn, median(values))
    found.put("of_oracle", paired_ratio(rates["in_loop"], rates["oracle"]), ">= 0.95")
    found.put("of_planned_anew", paired_ratio(rates["in_loop"], rates["planned_anew"]))
    found.put("static_of_oracle", paired_ratio(rates["static"], rates["oracle"]))
    found.put("recovered", recovered(rates["in_loop"], rates["static"], rates["oracle"]))
    found.put("decisions_until_the_last_move", moved[-1] if moved else None)
    found.put("intervals_until_the_last_move", intervals, "<= 2")
    found.put("parts_of_the_dominant_table", len(loop.final_plan.parts_of(name)), ">= 2")
    found.notes = [
        "static, in_loop: the plan of before the drift and the one resharding ended with; planned_anew, "
        "oracle: those that a job on the drifted data starts and ends with (the oracle's had two epochs "
        "until dc938d8); examples/s on these within one job whose tables move from plan to plan (medians over the "
        "rounds, ratios paired)",
        "the target of two intervals was one of two decisions when a job decided once an epoch, its interval here; "
        "now it decides within one, too, when its data have changed",
        *loop.texts,
        *(f"of the oracle's job: {text}" for text in oracle.texts),
        *(f"{variant}: {', '.join(map(str, turn.plan.parts_of(name)))}" for variant, turn in turns.items()),
    ]
    return vars(found)


def _job(workload: Workload, folder: Path, steps: int, epochs: int, change: int) -> Config:
    """change: the epoch from which the table is dominant."""
    model = workload.model
    return parse_config(
        {
            "run": {"dir": str(folder), "device": "cpu", "pin_cores": False},
            "data": {
                "source": "custom",
                "factory": "dlrm_autoshard.benchmarks.loop_split:BecomesDominant",
                "options": {"change": change, "samples": BATCH * steps},
            },
            "tables": {"optimizer": {"name": workload.optimizer, "lr": 0.02}},
            "model": model.model_dump(mode="json"),
            "train": {"batch_size": BATCH // WORLD_SIZE, "epochs": epochs},
            "checkpoint": {"enabled": False},
            "profile": dict(MANY_SAMPLES),
            "autoshard": {"enabled": True, "cache_dir": None},
        }
    )


class BecomesDominant:
    """Samples with `BEFORE` ids of the wide table, and from epoch `change` on with as many as of all others."""

    reuse_batches = NUM_BATCHES

    def __init__(self, tables_config: TablesConfig, change: int, samples: int) -> None:
        workload = dominated()
        self.tables, self.num_dense, alpha = workload.tables, workload.num_dense, workload.alpha
        self._change, self._samples = change, samples
        before = [BEFORE if table == DOMINANT else pooling for table, pooling in enumerate(workload.pooling)]
        self._phases = [
            drawn(
                self.tables, pooling, alpha, num_dense=self.num_dense, train_samples=samples, reuse_batches=NUM_BATCHES
            )
            for pooling in (before, workload.pooling)
        ]

    def num_samples(self, split: Split) -> int:
        return self._samples if split == "train" else 0

    def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
        return self._phases[epoch >= self._change].read(split, epoch, first, last)
