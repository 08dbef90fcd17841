"""Does a planner fitted to small tasks place large ones? 20 tables on 4 devices, then 100 tables on 8.

    dlrm-autoshard bench planner-generalization [--quick]

Two planners start from nothing: one is fitted (DreamShard's training, policy and cost model) to tasks of 20 tables on
4 devices only, the other to tasks of 100 tables on 8, from the same pool. Both then place the same 100 x 8 tasks, whose
tables neither saw. Measured with fbgemm in isolated mode; `--quick` takes simulated costs instead and says so.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from dlrm_autoshard.costs import step_cost_ms
from dlrm_autoshard.plan import Topology
from dlrm_autoshard.planner.dreamshard import DreamShardSettings
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planning.measured import Costs
from dlrm_autoshard.planning.pool import TablePool, synthetic_pool

TITLE = "a planner fitted to 20 tables x 4 devices, on 100 x 8, against one fitted there"
ROUGH_TIME = "25 min (quick, simulated: 2 min)"

BATCH_SIZE = 2048
SMALL, LARGE = (20, 4), (100, 8)


def run(quick: bool) -> dict[str, Any]:
    import torch

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    costs = Costs("simulated" if quick else "measured", Planner("search").law)
    settings = DreamShardSettings(iterations=5, placements=6) if quick else DreamShardSettings()
    train, test = (
        synthetic_pool(300, seed=21, batch_size=BATCH_SIZE),
        synthetic_pool(300, seed=22, batch_size=BATCH_SIZE),
    )
    fitted = {}
    for name, (num_tables, num_devices) in (("small", SMALL), ("large", LARGE)):
        tasks = [_task(train, num_tables, num_devices, index) for index in range(10)]
        fitted[name] = Planner("dreamshard", seed=0, settings=settings)
        fitted[name].fit(tasks, costs.measure)
    held_out = [_task(test, *LARGE, index) for index in range(4 if quick else 20)]
    cost: dict[str, list[float]] = {}
    for task in held_out:
        for name, planner in (*fitted.items(), ("lookup_greedy", Planner("lookup_greedy"))):
            for algorithm in ("dreamshard", "search") if name in fitted else ("lookup_greedy",):
                planner.algorithm = algorithm
                plan = planner.plan(task.tables, task.stats, task.topology, batch_size=BATCH_SIZE).plan
                [profile] = costs.measure(task, [plan])
                cost.setdefault(f"{name} {algorithm}", []).append(step_cost_ms(profile.ranks))
    mean = {name: float(np.mean(values)) for name, values in cost.items()}
    ratio = {
        algorithm: np.array(cost[f"small {algorithm}"]) / np.array(cost[f"large {algorithm}"])
        for algorithm in ("dreamshard", "search")
    }
    draws = np.random.default_rng(0).integers(0, len(held_out), size=(2000, len(held_out)))
    return {
        "figures": {
            "fitted on 20x4 / fitted on 100x8, dreamshard": mean["small dreamshard"] / mean["large dreamshard"],
            "fitted on 20x4 / fitted on 100x8, search": mean["small search"] / mean["large search"],
            "fitted on 20x4, dreamshard / lookup_greedy": mean["small dreamshard"]
            / mean["lookup_greedy lookup_greedy"],
            "tasks": len(held_out),
        },
        "targets": {
            "fitted on 20x4 / fitted on 100x8, dreamshard": "<= 1.03",
            "fitted on 20x4 / fitted on 100x8, search": "<= 1.03",
        },
        "spread": {
            f"fitted on 20x4 / fitted on 100x8, {algorithm}": [
                float(q) for q in np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
            ]
            for algorithm, values in ratio.items()
        },
        "notes": [f"costs are {costs.source}; mean ms {', '.join(f'{n} {m:.2f}' for n, m in mean.items())}"],
    }


def _task(pool: TablePool, num_tables: int, num_devices: int, index: int) -> PlacementTask:
    generator = np.random.default_rng((num_tables, index))
    chosen = pool.chosen(sorted(generator.choice(len(pool), num_tables, replace=False).tolist()))
    return PlacementTask.build(chosen.tables, chosen.stats, Topology(num_devices), batch_size=BATCH_SIZE)
