"""How long the planner takes with the reference's budget, and what its plans cost, beside DreamShard to the letter.

That budget is 10 iterations of 10 placements, 300 cost updates (ours: 50) and 10 policy updates of 10 episodes. Costs
are simulated, so that only the planner's own time is counted. Repeated; the median is reported and the spread shown.
CPU seconds stand beside wall seconds: on a shared machine the two part, and only CPU time is the planner's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dlrm_autoshard.costs import StepProfile, step_cost_ms
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.greedy import KEYS
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.pool import synthetic_pool
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.simulator import SimulatedCluster

TITLE = "planning time with the reference DreamShard's budget, simulated costs, one thread"
ROUGH_TIME = "1 min"
BATCH, DEVICES = 4096, 4
REFERENCE_SECONDS = {50: 43.0, 100: 86.0}


def run(quick: bool) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(quick)
    finally:
        torch.set_num_threads(threads)


def _run(quick: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    spread: dict[str, list[float]] = {}
    for tables in (50,) if quick else (50, 100):
        task = _task(tables)
        for name, reference in (("dreamshard", False), ("reference", True)):
            seconds, cpu = [], []
            for repeat in range(2 if quick else 5):
                # The first repeat warms up allocator and caches and is not counted.
                wall, own, planner = _train(task, reference)
                if repeat:
                    seconds.append(wall)
                    cpu.append(own)
            figures[f"{name}_seconds_{tables}_tables"] = float(np.median(seconds))
            figures[f"{name}_cpu_seconds_{tables}_tables"] = float(np.median(cpu))
            spread[f"{name}_seconds_{tables}_tables"] = [min(seconds), max(seconds)]
            figures[f"{name}_simulated_cost_ms_{tables}_tables"] = _cost(task, planner)
        figures[f"best_heuristic_simulated_cost_ms_{tables}_tables"] = min(
            _cost(task, Planner(heuristic)) for heuristic in KEYS
        )
        figures[f"speedup_over_reference_{tables}_tables"] = (
            REFERENCE_SECONDS[tables] / figures[f"dreamshard_seconds_{tables}_tables"]
        )
    targets = {"dreamshard_seconds_50_tables": "<= 2.0", "reference_seconds_50_tables": "<= 2.0"}
    if not quick:
        targets |= {"dreamshard_seconds_100_tables": "<= 4.0", "reference_seconds_100_tables": "<= 4.0"}
    return {
        "figures": figures,
        "targets": targets,
        "spread": spread,
        "notes": [
            "All costs are simulated.",
            "The reference's 43 s (50 tables) and 86 s (100 tables) were taken another day on a machine of this kind.",
        ],
    }


def _task(tables: int) -> PlacementTask:
    pool = synthetic_pool(tables, seed=tables, batch_size=BATCH)
    return PlacementTask.build(pool.tables, pool.stats, Topology(DEVICES), batch_size=BATCH)


def _train(task: PlacementTask, reference: bool) -> tuple[float, float, Planner]:
    planner = Planner("dreamshard", seed=0, reference=reference)
    started, started_cpu = time.perf_counter(), time.process_time()
    planner.fit([task], _simulated())
    return time.perf_counter() - started, time.process_time() - started_cpu, planner


def _cost(task: PlacementTask, planner: Planner) -> float:
    plan = planner.plan(task).plan
    return step_cost_ms(_simulated()(task, [plan])[0].ranks)


def _simulated() -> Callable[[PlacementTask, Sequence[ShardingPlan]], list[StepProfile]]:
    cluster = SimulatedCluster(seed=0)

    def measure(task: PlacementTask, plans: Sequence[ShardingPlan]) -> list[StepProfile]:
        return [cluster.profile(task.tables, task.stats, plan, task.batch_size) for plan in plans]

    return measure
