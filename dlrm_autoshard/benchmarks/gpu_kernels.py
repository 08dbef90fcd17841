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

BATCH_SIZE = 16_384


def shards(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """Fused shards of 1 to 50 tables, forward and backward, until time is up; a cost model on them. What is measured
    is what `python -m dlrm_autoshard.probe.collect --device cuda` measures."""
    from dlrm_autoshard.probe.collect import collect, fit, samples_in

    path = folder / "shards.jsonl"
    path.unlink(missing_ok=True)
    collect(path, 4000, 0.7 * seconds, torch.device("cuda"))
    samples, _, again = samples_in(path)
    found |= {"measured": len(samples), "measured_again_differs_by": float(np.median(np.abs(again))) if again else 0.0}
    planner, errors = fit(samples, samples)
    (folder / "cost_model.json").write_text(json.dumps(planner.costs.cost_model.to_json()))
    found |= {"held_out": errors["held_out_shards"]}
    found |= {f"held_out_error_{stage}": error for stage, error in errors["held_out_error"].items()}


def planning(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """As in the paper, tasks of 20 to 100 tables of one dim on 4 devices, by every algorithm: on measured computation,
    exchanges by an assumed law."""
    from dlrm_autoshard.costs import step_cost_ms
    from dlrm_autoshard.plan import Topology
    from dlrm_autoshard.planner.costs.cost_model import CostModel
    from dlrm_autoshard.planner.costs.exchange_model import NVLINK
    from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
    from dlrm_autoshard.planner.planner import Planner
    from dlrm_autoshard.planner.search.greedy import HEURISTICS
    from dlrm_autoshard.planner.task import PlacementTask
    from dlrm_autoshard.probe.isolated_probe import IsolatedProbe
    from dlrm_autoshard.probe.shard_probe import ShardProbe

    batch_size = BATCH_SIZE
    pool = synthetic_pool(120, seed=31, batch_size=batch_size, rows=(1e3, 1e6), dims=(16, 16), pooling=(1.0, 60.0))
    saved = folder / "cost_model.json"
    deadline = time.monotonic() + seconds
    probe = ShardProbe(device=torch.device("cuda"), buffer_gib=8.0, seconds_per_shard=0.02, most_kept_ids=1_000_000_000)
    learned = ("dreamshard", "search", "auto")
    costs: dict[str, dict[str, list[float]]] = {}
    generator = np.random.default_rng(32)
    for repeat in range(20):
        for count in (20, 50, 100):
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
                planner.costs.exchange.load_prices([NVLINK, NVLINK])
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
    batch_size = BATCH_SIZE
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
