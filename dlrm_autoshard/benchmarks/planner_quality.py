"""Measures the planner's plans against every heuristic's, on tasks whose tables the planner has never seen.

A task takes some minutes, so its row, with every round and the commit, is kept in runs/planner-quality: the benchmark
continues where it was stopped. `planner_quality_record` makes figures of the rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_autoshard.benchmarks.measured_exchanges import exchange_ms
from dlrm_autoshard.benchmarks.planner_quality_record import ADDED_UP, LEARNED, SPLIT, summarise
from dlrm_autoshard.benchmarks.slices import in_slices, origins
from dlrm_autoshard.benchmarks.workloads import warm_planner
from dlrm_autoshard.costs import PLANNED_STAGES, RankCost, StepProfile, step_cost_ms
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.costs.replay import CommsSample, comms_of
from dlrm_autoshard.planner.dreamshard.pool import TablePool, synthetic_pool
from dlrm_autoshard.planner.learned_costs import LearnedCosts
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.search.greedy import KEYS
from dlrm_autoshard.planner.search.local_search import search
from dlrm_autoshard.planner.task import PlacementTask, Splits
from dlrm_autoshard.planner.task_costs import TaskCosts
from dlrm_autoshard.probe.calibration import start_costs
from dlrm_autoshard.probe.hardware import hardware_fingerprint
from dlrm_autoshard.probe.isolated_probe import IsolatedProbe
from dlrm_autoshard.probe.shard_probe import ShardProbe, median_time

TITLE = "measured cost of the planner's plans against every heuristic's, on unseen tables"
ROUGH_TIME = "5 h; goes on where it was stopped (quick: 5 min)"

CELLS = ((20, 2), (20, 4), (20, 8), (50, 2), (50, 4), (50, 8), (100, 2), (100, 4), (100, 8))
BATCH_SIZE = 2048
ROUNDS = 4
MOST_REAL_RANKS = 4
DRAWN_PLANS, EXCHANGE_NOISE = 4, 0.1
_CORES = sorted(os.sched_getaffinity(0))  # before this process keeps to one of them


@dataclass(frozen=True)
class Cell:
    """Tasks of one size."""

    num_tables: int
    num_devices: int

    def __str__(self) -> str:
        return f"{self.num_tables}x{self.num_devices}"

    def tables(self, index: int) -> TablePool:
        """Returns the index-th task's tables, to which no cost model was fitted."""
        pool = synthetic_pool(428, seed=11, batch_size=BATCH_SIZE)
        generator = np.random.default_rng((self.num_tables, self.num_devices, index))
        return pool.chosen(sorted(generator.choice(len(pool), self.num_tables, replace=False).tolist()))


def run(quick: bool) -> dict[str, Any]:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    cells = {str(cell): cell for cell in ([Cell(20, 4)] if quick else [Cell(*cell) for cell in CELLS])}
    tasks = 3 if quick else 20
    rows = in_slices(
        None if quick else Path("runs/planner-quality/rows.jsonl"),
        [(name, index) for index in range(tasks) for name in cells],  # all cells have about as many
        lambda name, index: measure_task(cells[name], index),
    )
    return {**summarise(rows, list(cells), tasks), **origins(rows)}


def measure_task(cell: Cell, index: int) -> dict[str, Any]:
    """Plans one task with every algorithm, and returns the measured stages of all plans, interleaved.

    Shards are timed with fbgemm on one core. Exchanges are measured on up to MOST_REAL_RANKS real ranks; for more
    ranks they follow the planner's own model, and the row says so. The cost model is the shipped one, fitted to other
    tables. `auto` starts as in a job: it measures tables alone, then its finalists. It learns what exchanges take from
    a few drawn plans, because its finalists are measured without ranks. All plans are measured again afterwards, and
    only that counts, so a plan gains nothing by a lucky first measurement.
    """
    began = time.perf_counter()
    tables = cell.tables(index)
    task = PlacementTask.build(tables.tables, tables.stats, Topology(cell.num_devices), batch_size=BATCH_SIZE)
    # Many short measurements in turn: a slow stretch of the machine is longer than a shard's measurement.
    probe = ShardProbe(undisturbed=True, warmup=2, repeats=2, seconds_per_shard=0.0)
    isolated = partial(IsolatedProbe, tables.tables, tables.stats, BATCH_SIZE, probe)
    predictor, started = warm_planner("auto"), warm_planner("auto")
    splitting = replace(task, splits=Splits(max_parts=4, min_dim=16))
    real = cell.num_devices <= MOST_REAL_RANKS
    if real:
        started.costs.learn(_exchanges_of_drawn_plans(task), updates=0)
    start_costs(
        started,
        splitting,
        fingerprint=hardware_fingerprint(),
        measure_shards=isolated(started.costs.exchange).measure_shards,
    )
    plans: dict[str, ShardingPlan] = {}
    for algorithm in (*KEYS, *LEARNED, SPLIT):
        measures = algorithm in ("auto", SPLIT)
        planner = warm_planner("auto" if measures else algorithm)
        if measures:
            planner.load_state_dict(started.state_dict())
        finalists = isolated(started.costs.exchange, rounds=3).measure if measures else None
        plans[algorithm] = planner.plan(splitting if algorithm == SPLIT else task, measure=finalists).plan
    plans[ADDED_UP] = _added_up(task, isolated(predictor.costs.exchange, rounds=3), started)
    stages: dict[str, list[list[list[float]]]] = {algorithm: [] for algorithm in plans}
    for ranks_of in _measured(isolated(predictor.costs.exchange), plans):
        for algorithm, ranks in ranks_of.items():
            stages[algorithm].append([[round(rank.stage(stage), 4) for stage in PLANNED_STAGES] for rank in ranks])
    if real:
        for number, by_plan in enumerate(exchange_ms(task, list(plans.values()), ROUNDS, _CORES)):
            for algorithm, (forward, backward) in zip(plans, by_plan, strict=True):
                for row, there, back in zip(stages[algorithm][number], forward, backward, strict=True):
                    row[1], row[2] = round(there, 4), round(back, 4)
    return {
        "cell": str(cell),
        "exchange": "measured" if real else "modelled",
        "task": index,
        "stages_ms": stages,  # algorithm: rounds x ranks x PLANNED_STAGES
        "predicted_at_start_ms": {  # tables measured alone
            algorithm: step_cost_ms(started.predict(task, plan)) for algorithm, plan in plans.items()
        },
        "seconds": time.perf_counter() - began,
    }


def _measured(judge: IsolatedProbe, plans: dict[str, ShardingPlan]) -> Iterator[dict[str, tuple[RankCost, ...]]]:
    """Yields each plan's costs by rank, round by round. A round measures all plans' shards once, in a drawn order."""
    shards = sorted({frozenset(p.shards_on(r)) for p in plans.values() for r in range(p.world_size)}, key=sorted)
    for number in range(ROUNDS):
        judge.shard_times.clear()
        for position in np.random.default_rng(number).permutation(len(shards)):
            judge.measure_shard(shards[position])
        yield {algorithm: judge.profile(plan).ranks for algorithm, plan in plans.items()}


def _exchanges_of_drawn_plans(task: PlacementTask) -> list[CommsSample]:
    """Measures exchanges of plans drawn at random, so that no plan that is judged was measured."""
    generator = np.random.default_rng(0)
    plans = [task.plan_from(generator.integers(task.world_size, size=len(task.units))) for _ in range(DRAWN_PLANS)]
    samples = []
    for plan, (forward_ms, backward_ms) in zip(plans, exchange_ms(task, plans, 1, _CORES)[0], strict=True):
        ranks = [RankCost(0.0, there, back, 0.0) for there, back in zip(forward_ms, backward_ms, strict=True)]
        profile = StepProfile(plan, task.tables, task.stats, task.batch_size, tuple(ranks), "probe", EXCHANGE_NOISE)
        samples.append(comms_of(profile))
    return samples


def _added_up(task: PlacementTask, probe: IsolatedProbe, started: Planner) -> ShardingPlan:
    """Returns the plan of a search for which a rank computes as long as its tables take alone, measured."""
    probe.measure([ShardingPlan({name: rank for rank, name in enumerate(task.names)}, len(task.names))])
    times = [median_time(probe.shard_times[frozenset({name})]) for name in task.names]
    alone_T2 = np.array([[one.fwd_compute_ms, one.bwd_compute_ms] for one in times])
    return task.plan_from(search(task, AddedUp(task, started.costs, alone_T2)))


class AddedUp(TaskCosts):
    """Costs that add up over tables measured alone: no fusion, nothing learned."""

    def __init__(self, task: PlacementTask, costs: LearnedCosts, alone_T2: np.ndarray) -> None:
        super().__init__(task, costs.cost_model, costs.exchange)
        self.summary_TK = np.concatenate([self.summary_TK, alone_T2.astype(np.float32)], axis=1)
        self.summary_UK = task.units.sum_over_tables(self.summary_TK)

    def device_ms(self, summaries: np.ndarray) -> np.ndarray:
        return summaries[..., -2:]
