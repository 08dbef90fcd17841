"""A job that starts from the worst of the heuristics: what resharding makes of it, beside staying and the best plan."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from dlrm_autoshard.benchmarks.harness import Findings
from dlrm_autoshard.benchmarks.loop_job import JOB, Job, run_jobs, settings
from dlrm_autoshard.benchmarks.paired import paired_ratio
from dlrm_autoshard.benchmarks.plans_interleaved import Turn, best_of, plans_interleaved
from dlrm_autoshard.benchmarks.workloads import W_EMB
from dlrm_autoshard.config import Config
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.search.greedy import HEURISTICS
from dlrm_autoshard.planner.task import PlacementTask

TITLE = "from the worst heuristic's plan: throughput static, with resharding, and under the best plan known"
ROUGH_TIME = "2 min"


def heuristic_plans(batch_size: int) -> tuple[str, dict[str, ShardingPlan]]:
    """The worst of them by predicted cost, before anything is measured; and all of them."""
    task = PlacementTask.build(W_EMB.tables, W_EMB.stats(), Topology(2), batch_size=batch_size)
    plans = {name: Planner(name).plan(task) for name in HEURISTICS}
    return max(plans, key=lambda n: plans[n].predicted_ms), {name: result.plan for name, result in plans.items()}


def planned_by(folder: Path, seed: int, steps: int) -> Config:
    """A job that plans at its start with a seed of its own, and then moves nothing."""
    config = settings(folder, epochs=1, steps_per_epoch=steps, enabled=True, reshard={"enabled": False})
    return config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})


def run(quick: bool) -> dict[str, Any]:
    epochs, steps = (3, 20) if quick else (8, 60)
    name, heuristics = heuristic_plans(batch_size=1024)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shape: dict[str, Any] = {"steps_per_epoch": steps}
        loop = settings(folder, epochs=epochs, **shape, enabled=True, algorithm=name)
        planned = [Job(f"planned_{seed}", planned_by(folder, seed, steps)) for seed in ((1,) if quick else (1, 2))]
        runs = run_jobs([Job("loop", loop), *planned], folder)
    independent = {job.name: runs[job.name].final_plan for job in planned} | heuristics
    turns = {kind: Turn(p) for kind, p in {"found": runs["loop"].final_plan, **independent}.items()}
    rates = plans_interleaved(JOB, turns, 2 if quick else 20)
    best, chosen = best_of(rates, list(independent))
    of_static = paired_ratio(rates["found"], rates[name])
    found = Findings()
    found.put("static", median(rates[name]))
    found.put("in_loop_final_plan", median(rates["found"]))
    found.put("in_loop_last_epoch", runs["loop"].throughput(epochs - 1))
    found.put("best_known", median(best))
    found.put("of_best_known", paired_ratio(rates["found"], best), ">= 0.95")
    found.put("reshards", runs["loop"].moves, "<= 2")
    found.put("gain_over_static", of_static.map(lambda ratio: ratio - 1))
    found.notes = [
        f"Start: {name}, the worst of the heuristics by prediction.",
        "best_known: the fastest of plans that resharding had no part in: all heuristics' and planner runs "
        f"with other seeds. Each half of the rounds measures what the other chose; here {' and '.join(chosen)}.",
        *runs["loop"].texts,
    ]
    return vars(found)
