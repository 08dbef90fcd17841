"""Split tables where one of 26 tables has dim 128 and half of all lookups, and the others have dim 32.

On 2 ranks, the step of the planner's split plan over that of the best table-wise plan; losses must be those of whole
tables. On 4 ranks, the busiest rank's CPU time, with splits by columns, by rows and by both. Without ranks: plans of
MLPerf's DLRM-DCNv2, by what shards were measured to take on an H200, and the time to plan with splits.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from dlrm_autoshard.benchmarks.harness import Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import Ratio, alternate, paired_ratio
from dlrm_autoshard.benchmarks.plans_interleaved import WORLD_SIZE, Turn, best_of, busiest_cpu, plans_interleaved
from dlrm_autoshard.benchmarks.workloads import W_EMB, OurJob, Workload, warm_planner
from dlrm_autoshard.config import SHIPPED, load_config
from dlrm_autoshard.config_data import CriteoData
from dlrm_autoshard.data.sources.criteo.sample import MULTI_HOT_SIZES
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask, Splits
from dlrm_autoshard.probe.shipped_costs import start_warm
from dlrm_autoshard.tables import TableConfig, TableStats

TITLE = "split tables: the step against the best table-wise plan, the busiest rank's CPU, DCNv2's plans, planning time"
ROUGH_TIME = "6 min"

DOMINANT, POOLING, RANKS, EQUAL_STEPS = 14, 120, 4, 12
LARGE_BATCH, MIN_DIM = 65_536, 16
SPEED = "one dominant table of 26, 2 ranks: speed over the best table-wise plan"
PLANNING = "planning 50 tables x 8 devices, with splits over without"
LARGE = "seconds to plan 1,000 tables x 128 devices with splits"
BY_ROWS: dict[str, Any] = {"rows": True, "rows_to_balance": True}


def run(quick: bool) -> dict[str, Any]:
    found = Findings()
    _put_steps(found, quick)
    _put_busiest(found, quick)
    for devices in (8,) if quick else (8, 16):
        for kind, ratio in dcn_by_h200(devices).items():
            target = "<= 0.45" if kind == "all kinds" else None
            name = f"DCNv2 on {devices} simulated devices, shards as an H200's: step with {kind} over whole tables"
            found.put(name, round(ratio, 3), target)
    rounds = 2 if quick else 7
    found.put(PLANNING, planning_time(50, 8, rounds), "<= 2", digits=3)
    found.put(f"{PLANNING}, rows too", planning_time(50, 8, rounds, **BY_ROWS), "<= 2", digits=3)
    found.put(LARGE, round(planning_seconds(1000, 128, Splits(4, MIN_DIM)), 2), "<= 15")
    return vars(found)


def dominated() -> Workload:
    """Returns W-emb with narrow tables but for one, which is wide and has half of all lookups."""
    others = [pooling for table, pooling in enumerate(W_EMB.pooling) if table != DOMINANT]
    shares = [pooling * POOLING / sum(others) for pooling in others]
    return replace(
        W_EMB,
        name="dominant",
        pooling=(*shares[:DOMINANT], POOLING, *shares[DOMINANT:]),
        dim=32,
        dims=((DOMINANT, 128),),
        optimizer="adagrad",
        interaction="cat",
        bottom=(32,),
    )


def _task(workload: Workload, ranks: int, splits: Splits) -> PlacementTask:
    return PlacementTask.build(
        workload.tables, workload.stats(), Topology(ranks), batch_size=workload.batch_size, splits=splits
    )


def _put_steps(found: Findings, quick: bool) -> None:
    workload = dominated()
    table_wise = {
        name: warm_planner(name, workload.optimizer).plan(_task(workload, WORLD_SIZE, Splits())).plan
        for name in ("auto", "lookup_greedy", "dim_greedy")
    }
    splits = Splits(max_parts=4, optimizer=workload.optimizer)
    split = warm_planner("auto", workload.optimizer).plan(_task(workload, WORLD_SIZE, splits)).plan
    turns = {"split": Turn(split)} | {name: Turn(plan) for name, plan in table_wise.items()}
    rates = plans_interleaved(workload, turns, 4 if quick else 16)
    best, names = best_of(rates, list(table_wise))
    losses = [on_pinned_ranks(_losses, WORLD_SIZE, workload, plan)[0] for plan in (table_wise["auto"], split)]
    differ = sum(one != other for one, other in zip(*losses, strict=True))
    found.put(SPEED, paired_ratio(rates["split"], best), ">= 1.3", digits=3)
    found.put("steps whose losses differ from those of whole tables", differ, "== 0")
    found.notes += [f"2 ranks: {_parts(split)}", f"best table-wise plan: that of {' or '.join(names)}"]


def _put_busiest(found: Findings, quick: bool) -> None:
    """Adds whole tables' CPU time over that of the plans which the planner chooses by predictions alone."""
    workload = dominated()
    asked = {
        "whole": Splits(),
        "columns": Splits(max_parts=4, optimizer=workload.optimizer),
        "all kinds": Splits(max_parts=4, optimizer=workload.optimizer, **BY_ROWS),
        "rows alone": Splits(max_parts=4, allowed=False, optimizer=workload.optimizer, **BY_ROWS),
    }
    planner = warm_planner("auto", workload.optimizer)
    plans = {name: planner.plan(_task(workload, RANKS, splits)).plan for name, splits in asked.items()}
    seconds = busiest_cpu(workload, plans, RANKS, 3 if quick else 12)
    for name, plan in plans.items():
        found.notes.append(f"{RANKS} ranks, {name}: {_parts(plan)}")
        if name != "whole":
            figure = f"one dominant table of 26, {RANKS} ranks: busiest rank's CPU, whole over {name}"
            target = ">= 1.3" if name == "all kinds" else None
            found.put(figure, paired_ratio(seconds["whole"], seconds[name]), target, digits=3)


def _parts(plan: ShardingPlan) -> str:
    return ", ".join(f"{part} on rank {rank}" for part, rank in plan.rank_of.items() if "[" in part) or "nothing split"


def _losses(rank: int, world_size: int, workload: Workload, plan: ShardingPlan) -> list[float]:
    job = OurJob(workload, plan, rank, workload.batches(rank, world_size))
    losses = []
    for _ in range(EQUAL_STEPS):
        job.run(1)
        losses.append(float(job.dense.global_loss))
    return losses


def dcn_by_h200(devices: int) -> dict[str, float]:
    """Returns predicted steps of DCNv2's plans with splits over those of whole tables, by columns and by all kinds.

    Shards take what an H200's were measured to take; exchanges follow a data sheet. The 26 tables have the rows of the
    shipped config and MLPerf's ids a sample, and as many parts as devices pay for: an even share of 16 devices is 13 of
    214 lookups, and an eighth of the costliest table's 100 is as many.
    """
    config = load_config(SHIPPED / "mlperf_dcnv2.yaml")
    assert isinstance(config.data, CriteoData) and config.data.num_embeddings is not None
    dim, parts = config.tables.embedding_dim, max(4, devices // 2)
    tables = [TableConfig(f"cat_{i}", count, dim) for i, count in enumerate(config.data.num_embeddings)]
    stats = [TableStats(float(pooling), batch_size=LARGE_BATCH) for pooling in MULTI_HOT_SIZES]
    planner = Planner("auto")
    start_warm(planner, {"device": "cuda"})

    def ms(splits: Splits) -> float:
        task = PlacementTask.build(tables, stats, Topology(devices), batch_size=LARGE_BATCH, splits=splits)
        return planner.plan(task).predicted_ms

    columns, whole = Splits(max_parts=parts, min_dim=MIN_DIM), ms(Splits(max_parts=1, min_dim=MIN_DIM))
    return {"columns": ms(columns) / whole, "all kinds": ms(replace(columns, **BY_ROWS)) / whole}


def planning_time(tables: int, devices: int, rounds: int, **splits: Any) -> Ratio:
    """Returns the time to plan with splits over that without, interleaved, with the shipped costs."""
    split, whole = alternate(
        lambda: planning_seconds(tables, devices, Splits(4, MIN_DIM, **splits)),
        lambda: planning_seconds(tables, devices, Splits()),
        rounds=rounds,
    )
    return paired_ratio(split, whole)


def planning_seconds(tables: int, devices: int, splits: Splits) -> float:
    """Returns the seconds that one plan takes."""
    pool = synthetic_pool(tables, seed=0, batch_size=LARGE_BATCH)
    task = PlacementTask.build(pool.tables, pool.stats, Topology(devices), batch_size=LARGE_BATCH, splits=splits)
    planner = warm_planner()
    begun = time.perf_counter()
    planner.plan(task)
    return time.perf_counter() - begun
