"""Sections of `bench gpu-all` that time kernels: fused shards with a cost model fitted to them, and planning on
measured costs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from dlrm_autoshard.benchmarks.paired import ratio_of_means
from dlrm_autoshard.benchmarks.planner_quality_record import LEARNED
from dlrm_autoshard.costs import step_cost_ms
from dlrm_autoshard.plan import Topology
from dlrm_autoshard.planner.dreamshard.pool import TablePool, synthetic_pool
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.search.greedy import HEURISTICS
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import start_costs
from dlrm_autoshard.probe.collect import collect, fit, samples_in
from dlrm_autoshard.probe.hardware import hardware_fingerprint
from dlrm_autoshard.probe.isolated_probe import IsolatedProbe
from dlrm_autoshard.probe.shard_probe import ShardProbe

BATCH_SIZE = 16_384


def shards(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """Measures fused shards of 1 to 50 tables until time is up, as `python -m dlrm_autoshard.probe.collect --device
    cuda` does, and fits a cost model to them."""
    path = folder / "shards.jsonl"
    path.unlink(missing_ok=True)
    collect(path, 4000, 0.7 * seconds, torch.device("cuda"))
    samples, _, again = samples_in(path)
    found |= {"measured": len(samples), "measured_again_differs_by": float(np.median(np.abs(again))) if again else 0.0}
    _, errors = fit(samples, samples)
    found |= {"held_out": errors["held_out_shards"]}
    found |= {f"held_out_error_{stage}": error for stage, error in errors["held_out_error"].items()}


def planning(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """Compares all algorithms on tasks of 20 to 100 tables of one dim on 4 devices, as in DreamShard's paper.

    Computation is measured, exchanges follow an assumed law. Each task starts as a job does: tables are measured alone.
    """
    deadline = time.monotonic() + seconds
    pool = synthetic_pool(120, seed=31, batch_size=BATCH_SIZE, rows=(1e3, 1e6), dims=(16, 16), pooling=(1.0, 60.0))
    probe = ShardProbe(device=torch.device("cuda"), buffer_gib=8.0, seconds_per_shard=0.02, most_kept_ids=1_000_000_000)
    costs: dict[int, dict[str, list[float]]] = {20: {}, 50: {}, 100: {}}
    found |= {"costs_ms": costs, "spread": {}}
    generator = np.random.default_rng(32)
    for number in itertools.count():
        for count, of_size in costs.items():
            if time.monotonic() > deadline:
                return
            tables = pool.chosen(sorted(generator.choice(len(pool), count, replace=False).tolist()))
            for name, ms in _costs_of_plans(tables, probe, number).items():
                of_size.setdefault(name, []).append(ms)
            figures, spread = compared(count, of_size)
            found |= figures
            found["spread"] |= spread


def _costs_of_plans(tables: TablePool, probe: ShardProbe, seed: int) -> dict[str, float]:
    """Returns ms of a step of each algorithm's plan; all shards are measured again for it."""
    task = PlacementTask.build(tables.tables, tables.stats, Topology(4), batch_size=BATCH_SIZE)
    started = Planner("auto", seed=seed)

    def isolated() -> IsolatedProbe:
        return IsolatedProbe(tables.tables, tables.stats, BATCH_SIZE, probe, started.costs.exchange)

    start_costs(
        started,
        task,
        fingerprint=hardware_fingerprint(probe.device),
        measure_shards=isolated().measure_shards,
        budget_seconds=8.0,
    )
    plans = {}
    for name in (*HEURISTICS, *LEARNED):
        planner = Planner(name, seed=seed)
        planner.load_state_dict(started.state_dict())
        plans[name] = planner.plan(task, measure=isolated().measure, budget_seconds=5.0).plan  # only `auto` measures
    return dict(zip(plans, (step_cost_ms(one.ranks) for one in isolated().measure(list(plans.values()))), strict=True))


def compared(count: int, costs: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Returns how many times as fast plans are in the mean task of `count` tables, and the intervals."""
    best = min(set(costs) - {*LEARNED, "random"}, key=lambda name: fmean(costs[name]))
    ratios = {
        f"{count}_tables_{name}_speedup_over_random": ratio_of_means(costs["random"], costs[name]) for name in costs
    }
    ratios |= {f"{count}_tables_{name}_v_best_heuristic": ratio_of_means(costs[best], costs[name]) for name in LEARNED}
    figures = {f"{count}_tables_tasks": float(len(costs["auto"])), **{k: ratio.median for k, ratio in ratios.items()}}
    return figures, {name: [ratio.low, ratio.high] for name, ratio in ratios.items()}
