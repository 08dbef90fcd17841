"""A job that starts from the worst of the heuristics: what resharding makes of it, beside staying and the best plan."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from dlrm_autoshard.benchmarks.harness import paired_ratio
from dlrm_autoshard.benchmarks.loop_job import JOB, Job, run_jobs, settings
from dlrm_autoshard.benchmarks.plans_in_turns import Turn, plans_in_turns
from dlrm_autoshard.benchmarks.workloads import W_EMB
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.greedy import HEURISTICS
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask

TITLE = "from the worst heuristic's plan: throughput static, with resharding, and under the best plan known"
ROUGH_TIME = "2 min"


def worst_heuristic(batch_size: int) -> tuple[str, ShardingPlan]:
    """By predicted cost, before anything is measured."""
    task = PlacementTask.build(W_EMB.tables, W_EMB.stats(), Topology(2), batch_size=batch_size)
    plans = {name: Planner(name).plan(task) for name in HEURISTICS}
    name = max(plans, key=lambda n: plans[n].predicted_ms)
    return name, plans[name].plan


def run(quick: bool) -> dict[str, Any]:
    epochs, steps = (4, 30) if quick else (8, 60)
    name, plan = worst_heuristic(batch_size=1024)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shape: dict[str, Any] = {"steps_per_epoch": steps}
        loop = settings(folder, epochs=epochs, **shape, enabled=True, algorithm=name)
        planned = settings(folder, epochs=2, **shape, enabled=True, reshard={"enabled": False})
        runs = run_jobs([Job("loop", loop), Job("planned", planned)], folder)
    plans = {"static": plan, "found": runs["loop"].final_plan, "planned": runs["planned"].final_plan}
    rates = plans_in_turns(JOB, {kind: Turn(p) for kind, p in plans.items()}, 2 if quick else 20)
    best = max(rates, key=lambda kind: median(rates[kind]))
    of_best, of_static = paired_ratio(rates["found"], rates[best]), paired_ratio(rates["found"], rates["static"])
    return {
        "figures": {
            "static": median(rates["static"]),
            "in_loop_final_plan": median(rates["found"]),
            "in_loop_last_epoch": runs["loop"].throughput(epochs - 1),
            "best_known": median(rates[best]),
            "of_best_known": of_best.median,
            "reshards": runs["loop"].moves,
            "gain_over_static": of_static.median - 1,
        },
        "targets": {"of_best_known": ">= 0.95", "reshards": "<= 2"},
        "spread": {"of_best_known": [of_best.low, of_best.high]},
        "notes": [f"Start: {name}, the worst of the heuristics by prediction.", *runs["loop"].texts],
    }
