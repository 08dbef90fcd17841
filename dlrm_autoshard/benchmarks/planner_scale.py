"""How one plan's time and memory grow, from 50 tables on 4 devices to 10,000 on 1,024.

Each size is planned in a process of its own; the peak is that of the whole process, torch included.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from typing import Any

import numpy as np

TITLE = "time and memory of one plan, up to 10,000 tables on 1,024 devices"
ROUGH_TIME = "1 min"
SIZES = ((50, 4), (100, 8), (300, 32), (1000, 128), (3000, 300), (10_000, 1024))
BATCH = 65_536


def run(quick: bool) -> dict[str, Any]:
    sizes = [(50, 4), (1000, 128)] if quick else list(SIZES)
    figures: dict[str, Any] = {}
    growth = []
    context = multiprocessing.get_context("spawn")
    for tables, devices in sizes:
        with context.Pool(1) as pool:
            seconds, cpu, gib, gain = pool.apply(_plan, (tables, devices))
        name = f"{tables}_x_{devices}"
        figures[f"seconds_{name}"] = seconds
        figures[f"cpu_seconds_{name}"] = cpu
        figures[f"peak_gib_{name}"] = gib
        figures[f"predicted_gain_over_best_heuristic_{name}"] = gain
        growth.append((float(np.log(tables * devices)), float(np.log(seconds))))
    targets = {"seconds_1000_x_128": "<= 5.0", "peak_gib_1000_x_128": "<= 1.0"}
    if not quick:
        (x0, y0), (x1, y1) = growth[-3], growth[-1]
        figures["growth_exponent_in_tables_x_devices"] = (y1 - y0) / (x1 - x0)
        targets["seconds_10000_x_1024"] = "<= 60.0"
    return {
        "figures": figures,
        "targets": targets,
        "spread": {},
        "notes": ["Costs are the analytic prior's predictions; nothing was measured or simulated."],
    }


def _plan(tables: int, devices: int) -> tuple[float, float, float, float]:
    import torch

    from dlrm_autoshard.plan import Topology
    from dlrm_autoshard.planner.greedy import KEYS
    from dlrm_autoshard.planner.planner import Planner
    from dlrm_autoshard.planner.pool import synthetic_pool
    from dlrm_autoshard.planner.task import PlacementTask

    torch.set_num_threads(1)
    pool = synthetic_pool(tables, seed=0, batch_size=BATCH)
    started, started_cpu = time.perf_counter(), time.process_time()
    result = Planner("auto").plan(PlacementTask.build(pool.tables, pool.stats, Topology(devices), batch_size=BATCH))
    seconds, cpu = time.perf_counter() - started, time.process_time() - started_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    heuristic = min(result.best(name).predicted_ms for name in KEYS)
    return seconds, cpu, peak / 2**20, heuristic / result.predicted_ms - 1
