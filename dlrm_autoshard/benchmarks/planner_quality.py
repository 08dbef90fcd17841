"""Do the planner's plans cost less than the heuristics', measured, on tasks whose tables the planner never saw?

    dlrm-autoshard bench planner-quality [--quick]
    python -m dlrm_autoshard.benchmarks.planner_quality --rows rows.jsonl --cell 50x4 --seconds 100     # in slices
    python -m dlrm_autoshard.benchmarks.planner_quality --rows rows.jsonl --record planner-quality.json

Isolated mode: every shard is timed with fbgemm on one core; exchanges follow a law fitted to real gloo exchanges. The
cost model is the shipped one (fitted to other tables). `auto` measures its finalists, as in a job; then every plan of
a task, its finalists included, is measured anew, in turns and `ROUNDS` times, and only that counts: a plan that was
lucky in the first measurement gains nothing by it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_autoshard.benchmarks.harness import finish
from dlrm_autoshard.costs import balanced_cost_ms, step_cost_ms
from dlrm_autoshard.distributed.fingerprint import hardware_fingerprint
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.greedy import KEYS
from dlrm_autoshard.planner.planner import ALGORITHMS, Planner
from dlrm_autoshard.planning.pool import TablePool, synthetic_pool
from dlrm_autoshard.planning.warm_start import WARM_START, start_warm

TITLE = "measured cost of the planner's plans against every heuristic's, on unseen tables"
ROUGH_TIME = "40 min (quick: 2 min)"

CELLS = ((20, 4), (50, 4), (100, 8), (20, 2), (50, 2), (20, 8), (50, 8), (100, 4), (100, 2))
BATCH_SIZE = 2048
ROUNDS = 3
LEARNED = tuple(name for name in ("auto", "dreamshard", "search") if name in ALGORITHMS)


@dataclass(frozen=True)
class Cell:
    num_tables: int
    num_devices: int

    def __str__(self) -> str:
        return f"{self.num_tables}x{self.num_devices}"

    def task(self, index: int) -> TablePool:
        """The index-th held-out task: tables that no cost model was fitted to."""
        pool = synthetic_pool(428, seed=11, batch_size=BATCH_SIZE)
        generator = np.random.default_rng((self.num_tables, self.num_devices, index))
        return pool.chosen(sorted(generator.choice(len(pool), self.num_tables, replace=False).tolist()))


def run(quick: bool) -> dict[str, Any]:
    _use_one_core(max(os.sched_getaffinity(0)))
    cells = [Cell(20, 4)] if quick else [Cell(*cell) for cell in CELLS]
    tasks = 3 if quick else 20
    rows = [measure_task(cell, index) for cell in cells for index in range(tasks)]
    return summarise(rows, cells, tasks)


def measure_task(cell: Cell, index: int) -> dict[str, Any]:
    """Plans one task with every algorithm and measures all plans, in turns."""
    from dlrm_autoshard.distributed.probe import IsolatedProbe
    from dlrm_autoshard.distributed.shard_probe import ShardProbe

    began = time.perf_counter()
    task = cell.task(index)
    topology = Topology(cell.num_devices)
    probe = ShardProbe(undisturbed=True, seconds_per_shard=0.1)
    law = _warm("auto").law
    plans: dict[str, ShardingPlan] = {}
    seconds: dict[str, float] = {}
    for algorithm in (*KEYS, "random", *LEARNED):
        planner = _warm(algorithm)
        isolated = IsolatedProbe(task.tables, task.stats, BATCH_SIZE, probe, law, rounds=2)
        started = time.perf_counter()
        result = planner.plan(
            task.tables,
            task.stats,
            topology,
            batch_size=BATCH_SIZE,
            measure=isolated.measure if algorithm == "auto" else None,
        )
        plans[algorithm], seconds[algorithm] = result.plan, time.perf_counter() - started
    judge = IsolatedProbe(task.tables, task.stats, BATCH_SIZE, probe, law)
    shards = {
        frozenset(plan.tables_on(rank)): plan.tables_on(rank)
        for plan in plans.values()
        for rank in range(cell.num_devices)
    }
    costs: dict[str, list[float]] = {algorithm: [] for algorithm in plans}
    for _ in range(ROUNDS):
        judge.shard_times.clear()
        for names in shards.values():
            judge.measure_shard(names)
        for algorithm, plan in plans.items():
            costs[algorithm].append(step_cost_ms(judge.profile(plan).ranks))
    profiles = {algorithm: judge.profile(plan) for algorithm, plan in plans.items()}
    predictor = _warm("auto")
    return {
        "cell": str(cell),
        "task": index,
        "costs_ms": costs,
        "balanced_ms": {algorithm: balanced_cost_ms(profile.ranks) for algorithm, profile in profiles.items()},
        "predicted_ms": {
            algorithm: step_cost_ms(predictor.predict(plan, task.tables, task.stats, BATCH_SIZE))
            for algorithm, plan in plans.items()
        },
        "plan_seconds": seconds,
        "seconds": time.perf_counter() - began,
    }


def summarise(rows: Sequence[dict[str, Any]], cells: Sequence[Cell], tasks: int) -> dict[str, Any]:
    """Per cell: each algorithm's mean cost over the best heuristic's; what is removed of that one's excess.

    A cell of `cells` that was not measured, or on fewer than `tasks` tasks, is a missed target.
    """
    figures: dict[str, Any] = {}
    targets: dict[str, str] = {}
    spread: dict[str, Any] = {}
    notes = []
    for cell in map(str, cells):
        targets[f"{cell} tasks"] = f">= {tasks}"
        targets[f"{cell} auto / best heuristic"] = "<= 0.999"
        targets[f"{cell} dreamshard / best heuristic"] = "<= 0.999"
        targets[f"{cell} auto: excess removed"] = ">= 0.667"
    for cell in dict.fromkeys(row["cell"] for row in rows):
        own = [row for row in rows if row["cell"] == cell]
        cost = {name: np.array([np.median(row["costs_ms"][name]) for row in own]) for name in own[0]["costs_ms"]}
        best = min(KEYS, key=lambda name: float(cost[name].mean()))
        bound = np.array([row["balanced_ms"][best] for row in own])
        excess = float((cost[best] - bound).mean())
        figures[f"{cell} tasks"] = len(own)
        figures[f"{cell} best heuristic over balance bound"] = float((cost[best] / bound).mean())
        for name in LEARNED:
            if name not in cost:
                continue
            figures[f"{cell} {name} / best heuristic"] = float(cost[name].mean() / cost[best].mean())
            figures[f"{cell} {name}: excess removed"] = 1 - float((cost[name] - bound).mean()) / excess
            spread[f"{cell} {name} / best heuristic"] = _interval(cost[name], cost[best])
        figures[f"{cell} auto: tasks won or tied within 1%"] = float((cost["auto"] <= 1.01 * cost[best]).mean())
        figures[f"{cell} best heuristic / random"] = float(cost[best].mean() / cost["random"].mean())
        again = [
            abs(a / b - 1) for row in own for values in row["costs_ms"].values() for a, b in [(values[0], values[1])]
        ]
        figures[f"{cell} a cost measured again differs by"] = float(np.mean(again))
        predicted = [
            abs(row["predicted_ms"][name] / np.median(row["costs_ms"][name]) - 1) for row in own for name in cost
        ]
        figures[f"{cell} step cost predicted within"] = float(np.mean(predicted))
        means = {name: float(values.mean()) for name, values in cost.items()}
        notes.append(f"{cell}: best heuristic {best}; mean ms " + ", ".join(f"{n} {m:.2f}" for n, m in means.items()))
    notes.append("costs: shards measured with fbgemm on one core; exchanges by the law fitted to gloo exchanges")
    shipped = json.loads(WARM_START.with_suffix(".json").read_text())
    error, again = shipped["held_out_error"]["both"], shipped["measured_again_differs_by"]
    figures["cost network: error on held-out shards"] = error
    figures["cost network: a shard measured again differs by"] = again
    figures["cost network: error / measured again"] = error / again
    targets["cost network: error / measured again"] = "<= 1.5"
    notes.append(
        f"cost network: mean error {100 * error:.1f}% on {shipped['held_out_shards']} held-out shards (median "
        f"{100 * shipped['held_out_error_median']:.1f}%); a shard measured again differs by {100 * again:.1f}% in the "
        f"mean (median {100 * shipped['measured_again_differs_by_median']:.1f}%)"
    )
    return {"figures": figures, "targets": targets, "spread": spread, "notes": notes}


def _interval(ours: np.ndarray, theirs: np.ndarray) -> list[float]:
    """95% bootstrap interval, over tasks, of the ratio of mean costs."""
    draws = np.random.default_rng(0).integers(0, len(ours), size=(2000, len(ours)))
    low, high = np.quantile(ours[draws].mean(axis=1) / theirs[draws].mean(axis=1), [0.025, 0.975])
    return [float(low), float(high)]


def _use_one_core(core: int) -> None:
    import torch

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)


def _warm(algorithm: str) -> Planner:
    planner = Planner(algorithm, seed=0)
    start_warm(planner, hardware_fingerprint())
    return planner


def main() -> None:
    """One cell, in slices: appends a row for each task to `--rows` until `--seconds` are over."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cell", default="20x4", help="tables x devices")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--record", type=Path, help="write the benchmark's record of all rows here; measures nothing")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    if arguments.record:
        rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
        outcome = summarise(rows, [Cell(*cell) for cell in CELLS], arguments.tasks)
        record = finish("planner-quality", False, outcome, sum(row["seconds"] for row in rows))
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
        return
    _use_one_core(arguments.core)
    cell = Cell(*(int(part) for part in arguments.cell.split("x")))
    deadline = time.monotonic() + arguments.seconds
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()] if arguments.rows.exists() else []
    done = {row["task"] for row in rows if row["cell"] == str(cell)}
    for index in range(arguments.tasks):
        if index not in done and time.monotonic() < deadline:
            with arguments.rows.open("a") as file:
                file.write(json.dumps(measure_task(cell, index)) + "\n")
            done.add(index)
    print(f"{cell}: {len(done)} of {arguments.tasks} tasks measured")


if __name__ == "__main__":
    main()
