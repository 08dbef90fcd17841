"""Balance of MLPerf's DLRM-DCNv2 on simulated devices with tables split by columns, and the time to plan it.

balance = dcn_balance(devices=8, seed=0)     # {"whole": 3.74, "split": 1.1, "step": 0.62}
ratio = planning_time(50, 8, rounds=5)       # with splits over without
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from dlrm_autoshard.benchmarks.cost_oracle import CostOracle
from dlrm_autoshard.benchmarks.paired import Ratio, alternate, paired_ratio
from dlrm_autoshard.benchmarks.planner_oracle import started
from dlrm_autoshard.benchmarks.workloads import warm_planner
from dlrm_autoshard.config import SHIPPED, load_config
from dlrm_autoshard.config_data import CriteoData
from dlrm_autoshard.data.sources.criteo.sample import MULTI_HOT_SIZES
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask, Splits
from dlrm_autoshard.probe.shipped_costs import start_warm
from dlrm_autoshard.tables import TableConfig, TableStats, lookup_work

BATCH = 65_536
MIN_DIM = 16


def dcn_task(devices: int) -> PlacementTask:
    """Its 26 tables with their rows and ids a sample, as the shipped config has them. As many parts as devices pay for:
    an even share of 16 devices is 13 of 214 lookups, and an eighth of the costliest table's 100."""
    config = load_config(SHIPPED / "mlperf_dcnv2.yaml")
    assert isinstance(config.data, CriteoData) and config.data.num_embeddings is not None
    rows, dim = config.data.num_embeddings, config.tables.embedding_dim
    tables = [TableConfig(f"cat_{i}", count, dim) for i, count in enumerate(rows)]
    stats = [TableStats(float(pooling), batch_size=BATCH) for pooling in MULTI_HOT_SIZES]
    splits = Splits(max_parts=max(4, devices // 2), min_dim=MIN_DIM)
    return PlacementTask.build(tables, stats, Topology(devices), batch_size=BATCH, splits=splits)


def dcn_balance(devices: int, seed: int) -> dict[str, float]:
    """Max over mean of ranks' lookups, of a start's plans with whole tables and with parts, and the step's exact cost
    with parts over that without, on the oracle's `seed`-th machine. A part has its share of the columns of a lookup."""
    task = dcn_task(devices)
    oracle = CostOracle(task.tables, task.stats, BATCH, devices, seed=seed)
    split = started(task, oracle, seed).plan
    whole = started(replace(task, splits=Splits()), oracle, seed).plan
    return {
        "whole": _max_over_mean(task, whole),
        "split": _max_over_mean(task, split),
        "step": oracle.plan_ms(split) / oracle.plan_ms(whole),
    }


def dcn_by_h200(devices: int) -> dict[str, float]:
    """Returns predicted steps of plans with splits over that of whole tables, by what an H200's shards were measured to
    take and a data sheet's exchanges: of columns, and of rows, too."""
    task = dcn_task(devices)
    planner = Planner("auto")
    start_warm(planner, {"device": "cuda"})

    def ms(**asked: Any) -> float:
        return planner.plan(replace(task, splits=replace(task.splits, **asked))).predicted_ms

    whole = ms(max_parts=1)
    return {"columns": ms() / whole, "all kinds": ms(rows=True, rows_to_balance=True) / whole}


def _max_over_mean(task: PlacementTask, plan: ShardingPlan) -> float:
    work_W = np.zeros(task.world_size)
    for name, rank in plan.rank_of.items():
        shard, stat = task.shard(name)
        work_W[rank] += lookup_work(shard.embedding_dim, stat.mean_pooling)
    return float(work_W.max() / work_W.mean())


def planning_time(tables: int, devices: int, rounds: int, rows: bool = False) -> Ratio:
    """Seconds of a plan with splits over one without, interleaved, with the shipped costs. rows: splits by rows,
    too."""
    split, whole = alternate(
        lambda: planning_seconds(tables, devices, splits=True, rows=rows),
        lambda: planning_seconds(tables, devices, splits=False),
        rounds=rounds,
    )
    return paired_ratio(split, whole)


def planning_seconds(tables: int, devices: int, splits: bool, rows: bool = False) -> float:
    """Returns the seconds that one plan takes."""
    pool = synthetic_pool(tables, seed=0, batch_size=BATCH)
    task = PlacementTask.build(
        pool.tables,
        pool.stats,
        Topology(devices),
        batch_size=BATCH,
        splits=Splits(max_parts=4, min_dim=MIN_DIM, rows=rows, rows_to_balance=rows) if splits else Splits(),
    )
    planner = warm_planner()
    begun = time.perf_counter()
    planner.plan(task)
    return time.perf_counter() - begun
