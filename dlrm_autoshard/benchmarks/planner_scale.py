"""How one plan's time and memory grow, from 50 tables on 4 devices to 10,000 on 1,024.

Each size is planned in a process of its own; the peak is that of the whole process, torch included.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from typing import Any

import numpy as np
import torch

from dlrm_autoshard.benchmarks.harness import Findings
from dlrm_autoshard.plan import Topology
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.search.greedy import KEYS
from dlrm_autoshard.planner.task import PlacementTask

TITLE = "time and memory of one plan, up to 10,000 tables on 1,024 devices"
ROUGH_TIME = "1 min"
SIZES = ((50, 4), (100, 8), (300, 32), (1000, 128), (3000, 300), (10_000, 1024))
BATCH = 65_536


def run(quick: bool) -> dict[str, Any]:
    found, growth = Findings(), []
    context = multiprocessing.get_context("spawn")
    for tables, devices in [(50, 4), (1000, 128)] if quick else SIZES:
        with context.Pool(1) as pool:
            figures = pool.apply(_plan, (tables, devices))
        for name, value in figures.items():
            found.put(f"{name}_{tables}_x_{devices}", value)
        growth.append((np.log(tables * devices), np.log(figures["seconds"])))
    found.targets = {"seconds_1000_x_128": "<= 5.0", "peak_gib_1000_x_128": "<= 1.0"}
    if not quick:
        (x0, y0), (x1, y1) = growth[-3], growth[-1]
        found.put("growth_exponent_in_tables_x_devices", float((y1 - y0) / (x1 - x0)))
        found.targets["seconds_10000_x_1024"] = "<= 60.0"
    found.notes = ["Costs are the analytic prior's predictions; nothing was measured or simulated."]
    return vars(found)


def _plan(tables: int, devices: int) -> dict[str, float]:
    torch.set_num_threads(1)
    pool = synthetic_pool(tables, seed=0, batch_size=BATCH)
    started, started_cpu = time.perf_counter(), time.process_time()
    result = Planner("auto").plan(PlacementTask.build(pool.tables, pool.stats, Topology(devices), batch_size=BATCH))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    heuristic = min(result.best(name).predicted_ms for name in KEYS)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "predicted_gain_over_best_heuristic": heuristic / result.predicted_ms - 1,
    }
