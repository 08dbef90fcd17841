"""A job that starts from the worst of the heuristics: what the loop makes of it, beside staying and the best plan."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.loop_job import Job, fixed_plan, run_jobs, settings
from dlrm_autoshard.benchmarks.workloads import W_EMB
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.greedy import HEURISTICS
from dlrm_autoshard.planner.planner import Planner

TITLE = "from the worst heuristic's plan: throughput static, with the loop, and under the best plan known"
ROUGH_TIME = "2 min"


def worst_heuristic(batch_size: int) -> tuple[str, ShardingPlan]:
    """By predicted cost, before anything is measured."""
    plans = {
        name: Planner(name).plan(W_EMB.tables, W_EMB.stats(), Topology(2), batch_size=batch_size) for name in HEURISTICS
    }
    name = max(plans, key=lambda n: plans[n].predicted_ms)
    return name, plans[name].plan


def run(quick: bool) -> dict[str, Any]:
    epochs, steps = (4, 30) if quick else (8, 60)
    name, plan = worst_heuristic(batch_size=1024)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shape: dict[str, Any] = {"steps_per_epoch": steps}
        static = settings(folder, epochs=2, **shape, **fixed_plan(plan, folder))
        loop = settings(folder, epochs=epochs, **shape, enabled=True, algorithm=name)
        planned = settings(folder, epochs=2, **shape, enabled=True, reshard={"enabled": False})
        runs = run_jobs([Job("loop", loop), Job("planned", planned)], folder)
        found = settings(folder, epochs=2, **shape, **fixed_plan(runs["loop"].final_plan, folder))
        best = settings(folder, epochs=2, **shape, **fixed_plan(runs["planned"].final_plan, folder))
        # In turns, so that a slow spell falls on all alike.
        again = run_jobs(
            [
                Job(f"{kind}{i}", c)
                for i in range(2)
                for kind, c in (("static", static), ("found", found), ("best", best))
            ],
            folder,
        )
    rate = {kind: max(again[f"{kind}{i}"].throughput(0) for i in range(2)) for kind in ("static", "found", "best")}
    best_known = max(rate.values())
    return {
        "figures": {
            "static": rate["static"],
            "in_loop_final_plan": rate["found"],
            "in_loop_last_epoch": runs["loop"].throughput(epochs - 1),
            "best_known": best_known,
            "of_best_known": rate["found"] / best_known,
            "reshards": runs["loop"].moves,
            "gain_over_static": rate["found"] / rate["static"] - 1,
        },
        "targets": {"of_best_known": ">= 0.95", "reshards": "<= 2"},
        "notes": [f"Start: {name}, the worst of the heuristics by prediction.", *runs["loop"].texts],
    }
