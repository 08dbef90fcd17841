"""Sections of `bench gpu-all` that time kernels: fused shards with a cost model on them, planning on measured costs,
and how near the lookup comes to the memory's bandwidth."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

POOL = {"rows": (1e3, 1e7), "dims": (4, 256), "pooling": (0.5, 60.0)}
BATCH_SIZES, TABLES = (16384, 4096), 96
"""So that the ids of all tables, drawn on the host, stay in the probe's cache: else drawing takes all the time."""


def shards(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """Fused shards of 1 to 50 tables, forward and backward, until 2,400 are measured or time is up; a model on them."""
    from dlrm_autoshard.planner.costs.cost_model import CostModel
    from dlrm_autoshard.planner.costs.fit_costs import fit_cost_model
    from dlrm_autoshard.planner.costs.replay import ShardSample
    from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
    from dlrm_autoshard.probe.hardware import hardware_fingerprint
    from dlrm_autoshard.probe.shard_probe import ShardProbe

    device = torch.device("cuda")
    deadline = time.monotonic() + 0.8 * seconds
    pools = {size: synthetic_pool(TABLES, seed=21, batch_size=size, **POOL) for size in BATCH_SIZES}  # type: ignore[arg-type]
    free, _ = torch.cuda.mem_get_info(device)
    probe = ShardProbe(device=device, buffer_gib=0.4 * free / 2**30, repeats=5, seconds_per_shard=0.02)
    generator = np.random.default_rng(22)
    samples: list[ShardSample] = []
    while len(samples) < 2400 and time.monotonic() < deadline:
        size = int(generator.choice(BATCH_SIZES))
        count = int(np.exp(generator.uniform(0, np.log(51))))
        pool = pools[size].chosen(generator.choice(TABLES, count, replace=False).tolist())
        time_ = probe.measure(pool.tables, pool.stats, size)
        samples.append(
            ShardSample(pool.tables, pool.stats, size, time_.fwd_compute_ms, time_.bwd_compute_ms, time_.noise)
        )
    with (folder / "shards.jsonl").open("w") as file:
        file.write(json.dumps({"fingerprint": hardware_fingerprint(device), "pool_seed": 21, "draw_seed": 22}) + "\n")
        for sample in samples:
            names = [int(table.name.removeprefix("t_")) for table in sample.tables]
            row = [sample.batch_size, names, round(sample.fwd_compute_ms, 4), round(sample.bwd_compute_ms, 4)]
            file.write(json.dumps(row) + "\n")
    found["measured"] = len(samples)
    held_out = samples[::5]
    model = CostModel(0)
    others = [sample for i, sample in enumerate(samples) if i % 5]
    fit_cost_model(model, others, updates=1500, budget_seconds=0.2 * seconds)
    predicted = model.shard_ms(held_out)
    measured = np.array([[sample.fwd_compute_ms, sample.bwd_compute_ms] for sample in held_out])
    error = np.abs(np.array(predicted).sum(1) / measured.sum(1) - 1)
    (folder / "cost_model.json").write_text(json.dumps(model.to_json()))
    found |= {"held_out": len(held_out), "held_out_error": float(error.mean())}


def planning(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """The paper's setting on measured computation: tasks of 20 to 100 tables on 4 devices, every algorithm."""
    from dlrm_autoshard.costs import step_cost_ms
    from dlrm_autoshard.plan import Topology
    from dlrm_autoshard.planner.costs.cost_model import CostModel
    from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
    from dlrm_autoshard.planner.planner import Planner
    from dlrm_autoshard.planner.search.greedy import HEURISTICS
    from dlrm_autoshard.planner.task import PlacementTask
    from dlrm_autoshard.probe.isolated_probe import IsolatedProbe
    from dlrm_autoshard.probe.shard_probe import ShardProbe

    batch_size = BATCH_SIZES[0]
    pool = synthetic_pool(120, seed=31, batch_size=batch_size, rows=(1e3, 1e6), dims=(16, 16), pooling=(1.0, 60.0))
    saved = folder / "cost_model.json"
    deadline = time.monotonic() + seconds
    probe = ShardProbe(device=torch.device("cuda"), buffer_gib=8.0, seconds_per_shard=0.02)
    learned = ("dreamshard", "search", "auto")
    costs: dict[str, dict[str, list[float]]] = {}
    generator = np.random.default_rng(32)
    for repeat in range(20):
        for count in (20, 40, 60, 80, 100):
            if time.monotonic() > deadline:
                break
            task = pool.chosen(sorted(generator.choice(len(pool), count, replace=False).tolist()))
            of_task: dict[str, float] = {}
            for name in (*HEURISTICS, *learned):
                if time.monotonic() > deadline:
                    break
                model = CostModel(0)
                if saved.exists():
                    model.load_json(json.loads(saved.read_text()))
                planner = Planner(name, seed=repeat, cost_model=model)
                isolated = IsolatedProbe(task.tables, task.stats, batch_size, probe, planner.costs.exchange)
                measure = isolated.measure if name == "auto" else None
                plan = planner.plan(
                    PlacementTask.build(task.tables, task.stats, Topology(4), batch_size=batch_size), measure=measure
                ).plan
                judge = IsolatedProbe(task.tables, task.stats, batch_size, probe, planner.costs.exchange)
                [profile] = judge.measure([plan])
                of_task[name] = step_cost_ms(profile.ranks)
            if len(of_task) == len(HEURISTICS) + len(learned):  # else the time ended in the midst of them
                for name, ms in of_task.items():
                    costs.setdefault(str(count), {}).setdefault(name, []).append(ms)
    found["costs_ms"] = costs
    for size, by_name in costs.items():
        best = min(
            (name for name in by_name if name in HEURISTICS and name != "random"), key=lambda n: fmean(by_name[n])
        )
        found[f"{size}_tables_tasks"] = len(by_name[best])
        for name, values in by_name.items():
            found[f"{size}_tables_{name}_speedup_over_random"] = fmean(by_name["random"]) / fmean(values)
        for name in learned:
            found[f"{size}_tables_{name}_v_best_heuristic"] = fmean(by_name[best]) / fmean(by_name[name])


def roofline(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """Bytes that a fused lookup must move, over the time they take at the measured copy bandwidth."""
    from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
    from dlrm_autoshard.probe.shard_probe import ShardProbe

    device = torch.device("cuda")
    block = torch.empty(1 << 28, device=device)  # 1 GiB
    other = torch.empty_like(block)
    copies = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        other.copy_(block)
        end.record()
        end.synchronize()
        copies.append(start.elapsed_time(end))
    bandwidth = 2 * block.nbytes / (1e-3 * float(np.median(copies)))
    del block, other
    batch_size = BATCH_SIZES[0]
    pool = synthetic_pool(26, seed=41, batch_size=batch_size, rows=(1e5, 1e6), dims=(128, 128), pooling=(5.0, 40.0))
    measured = ShardProbe(device=device, buffer_gib=30.0, repeats=10).measure(pool.tables, pool.stats, batch_size)
    ids = sum(stat.mean_pooling * batch_size for stat in pool.stats)
    unique = sum(stat.mean_pooling * batch_size / stat.mean_reuse for stat in pool.stats)
    row, output = 4 * 128, 4 * 128 * batch_size * len(pool.tables)
    forward = {"every use": ids * row + 4 * ids + output, "once per row": unique * row + 4 * ids + output}
    found |= {"copy_bandwidth_gb_s": bandwidth / 1e9, "forward_ms": measured.fwd_compute_ms}
    for name, size in forward.items():
        share = size / bandwidth / (1e-3 * measured.fwd_compute_ms)
        found[f"forward_share_reading_{name.replace(' ', '_')}"] = share
    found["backward_ms"] = measured.bwd_compute_ms
