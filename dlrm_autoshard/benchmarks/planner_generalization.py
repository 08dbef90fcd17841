"""Does a planner fitted to small tasks place large ones? 20 tables on 4 devices, then 100 tables on 8.

Two planners start from nothing: one is fitted (DreamShard's training, policy and cost model) to tasks of 20 tables on
4 devices only, the other to tasks of 100 tables on 8, from the same pool. Both then place the same 100 x 8 tasks, whose
tables neither saw. Costs are measured with fbgemm on one core in isolated mode, plans of a task interleaved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dlrm_autoshard.benchmarks.harness import Findings
from dlrm_autoshard.benchmarks.paired import ratio_of_means
from dlrm_autoshard.costs import StepProfile, step_cost_ms
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.costs.exchange_model import ExchangeModel
from dlrm_autoshard.planner.dreamshard.pool import TablePool, synthetic_pool
from dlrm_autoshard.planner.dreamshard.settings import DreamShardSettings
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.isolated_probe import IsolatedProbe
from dlrm_autoshard.probe.shard_probe import ShardProbe

TITLE = "fitted to 20 tables x 4 devices, on 100 x 8, over one fitted there (compute measured, exchange modelled)"
ROUGH_TIME = "5 min (quick: 1 min)"

BATCH_SIZE = 2048
SMALL, LARGE = (20, 4), (100, 8)
TRAINING_TASKS = 10
ROUNDS = 4
ALGORITHMS = ("dreamshard", "search")


def run(quick: bool) -> dict[str, Any]:
    """Tables are small ones (see `_pool`), so that the two trainings take a minute and not an hour; `quick` trains on a
    fifth of the reference's number of placements and tests on fewer tasks.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    probe = ShardProbe(undisturbed=True, warmup=2, repeats=3, seconds_per_shard=0.0)

    def measure(task: PlacementTask, plans: Sequence[ShardingPlan], rounds: int = 1) -> list[StepProfile]:
        return IsolatedProbe(task.tables, task.stats, BATCH_SIZE, probe, ExchangeModel(), rounds).measure(plans)

    settings = DreamShardSettings(iterations=4, placements=5) if quick else DreamShardSettings()
    train, test = _pool(21), _pool(22)
    fitted: dict[str, Planner] = {}
    seconds: dict[str, float] = {}
    for name, (num_tables, num_devices) in (("small", SMALL), ("large", LARGE)):
        started = time.perf_counter()
        tasks = [_task(train, num_tables, num_devices, index) for index in range(TRAINING_TASKS)]
        fitted[name] = Planner("dreamshard", seed=0, settings=settings)
        fitted[name].fit(tasks, measure)
        seconds[name] = time.perf_counter() - started
    cost: dict[str, list[float]] = {}
    num_tests = 4 if quick else 20
    for index in range(num_tests):
        task = _task(test, *LARGE, index)
        plans = {"lookup_greedy": Planner("lookup_greedy").plan(task).plan}
        for name, planner in fitted.items():
            for algorithm in ALGORITHMS:
                planner.algorithm = algorithm
                plans[f"{name} {algorithm}"] = planner.plan(task).plan
        for name, profile in zip(plans, measure(task, list(plans.values()), ROUNDS), strict=True):
            cost.setdefault(name, []).append(step_cost_ms(profile.ranks))
    found = Findings()
    for algorithm in ALGORITHMS:
        small, large = (cost[f"{name} {algorithm}"] for name in fitted)
        found.put(f"fitted on 20x4 / fitted on 100x8, {algorithm}", ratio_of_means(small, large), "<= 1.03")
        found.put(
            f"fitted on 20x4, {algorithm} / lookup_greedy", float(np.mean(small) / np.mean(cost["lookup_greedy"]))
        )
    found.put("tasks", num_tests)
    found.put("seconds to fit on 20x4, measuring included", seconds["small"])
    found.put("seconds to fit on 100x8, measuring included", seconds["large"])
    found.notes = [
        "compute measured with fbgemm on one core, exchange modelled: 8 ranks are more than run here; mean ms "
        + ", ".join(f"{name} {np.mean(ms):.2f}" for name, ms in cost.items()),
        "tables: 1,000 to 100,000 rows, dims 8 to 64, mean pooling 1 to 10; batch 2,048; "
        f"{settings.iterations * settings.placements} placements measured in each training",
    ]
    return vars(found)


def _pool(seed: int) -> TablePool:
    return synthetic_pool(300, seed=seed, batch_size=BATCH_SIZE, rows=(1e3, 1e5), dims=(8, 64), pooling=(1.0, 10.0))


def _task(pool: TablePool, num_tables: int, num_devices: int, index: int) -> PlacementTask:
    generator = np.random.default_rng((num_tables, index))
    chosen = pool.chosen(sorted(generator.choice(len(pool), num_tables, replace=False).tolist()))
    return PlacementTask.build(chosen.tables, chosen.stats, Topology(num_devices), batch_size=BATCH_SIZE)
