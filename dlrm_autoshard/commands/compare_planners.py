"""`dlrm-autoshard compare-planners`: compares algorithms on the same tasks by the step cost of their plans.

    dlrm-autoshard compare-planners --algorithm auto --algorithm fitted/ --tasks tasks.json --devices 4 --memory-gib 5

Means are over the tasks that every algorithm placed; the number of tasks that an algorithm could not place is shown
beside them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_autoshard.commands.arguments import (
    ALGORITHM_NAMES,
    add_devices,
    add_output,
    check_out,
    positive,
    seed,
    write_json,
)
from dlrm_autoshard.commands.planning import planner_of, topology_of
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.progress import tracked


@dataclass
class Outcome:
    """One algorithm's results. cost_ms[i] is task i's step cost, nan if the algorithm found no legal plan."""

    cost_ms: list[float] = field(default_factory=list)
    plan_seconds: list[float] = field(default_factory=list)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("compare-planners", help="compare placement algorithms on the same tasks")
    parser.add_argument(
        "--algorithm",
        action="append",
        default=[],
        metavar="NAME|DIR",
        help=f"{ALGORITHM_NAMES}; or a directory made by `fit`; repeat for several (default: all algorithms)",
    )
    parser.add_argument(
        "--fitted", type=Path, metavar="DIR", help="costs made by `fit`, for all algorithms given by name"
    )
    parser.add_argument("--tasks", type=Path, required=True, metavar="FILE", help="tasks.json of `tasks`")
    add_devices(parser)
    parser.add_argument("--split", choices=["test", "train"], default="test")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N tasks")
    parser.add_argument(
        "--costs",
        choices=["measured", "simulated"],
        default="measured",
        help="measured: with fbgemm on this machine; simulated: by formula, for which only --fitted costs are right",
    )
    parser.add_argument("--seed", type=seed, default=0)
    add_output(parser, "write the figures as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dlrm_autoshard.planner.dreamshard.drawn_tasks import TaskSet
    from dlrm_autoshard.planner.planner import ALGORITHMS

    names = list(dict.fromkeys(arguments.algorithm)) or list(ALGORITHMS)
    for name in names:
        if name not in ALGORITHMS and not Path(name).is_dir():
            raise UserError(
                f"'{name}' is neither an algorithm ({', '.join(ALGORITHMS)}) nor a directory made by `fit`."
            )
    check_out(arguments.out)
    tasks = TaskSet.load(arguments.tasks)
    record = evaluate(names, tasks, arguments)
    write_json(arguments.out, record)
    if arguments.json:
        print(json.dumps(record, indent=1))
    else:
        _print(record)
    return 0


def evaluate(names: Sequence[str], tasks: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns each algorithm's costs and seconds on the tasks."""
    from dlrm_autoshard.costs import step_cost_ms
    from dlrm_autoshard.plan import PlanError
    from dlrm_autoshard.planner.planner import ALGORITHMS
    from dlrm_autoshard.planner.task import PlacementTask
    from dlrm_autoshard.probe.measured import Costs

    topology = topology_of(arguments.devices, arguments.memory_gib)
    shipped = arguments.costs == "measured"  # shipped costs are a real machine's, not the simulated one's
    planners = {
        name: planner_of(
            name, arguments.seed, arguments.fitted if name in ALGORITHMS and name != "random" else None, shipped=shipped
        )
        for name in dict.fromkeys([*names, "random"])
    }
    costs = Costs(arguments.costs, planners["random"].costs.exchange, arguments.seed)
    outcomes = {name: Outcome() for name in planners}
    chosen = (tasks.test if arguments.split == "test" else tasks.train)[: arguments.limit]
    for pool in tracked(chosen, len(chosen), f"{arguments.costs} tasks", arguments.json):
        task = PlacementTask.build(pool.tables, pool.stats, topology, batch_size=tasks.batch_size)
        for name, planner in planners.items():
            started = time.perf_counter()
            try:
                plan = planner.plan(task).plan
            except PlanError:
                outcomes[name].cost_ms.append(float("nan"))
                continue
            outcomes[name].plan_seconds.append(time.perf_counter() - started)
            [profile] = costs.measure(task, [plan])
            outcomes[name].cost_ms.append(step_cost_ms(profile.ranks))
    return {
        "schema": 1,
        "split": arguments.split,
        "devices": arguments.devices,
        "costs": arguments.costs,
        "tasks": len(chosen),
        "algorithms": summarise(outcomes),
    }


def summarise(outcomes: dict[str, Outcome]) -> list[dict[str, Any]]:
    """Returns a row per algorithm, best mean first; speedup over random with its 95% bootstrap interval over tasks."""
    cost = {name: np.array(outcome.cost_ms) for name, outcome in outcomes.items()}
    placed_by_all = np.all([~np.isnan(values) for values in cost.values()], axis=0)
    tasks = max(int(placed_by_all.sum()), 1)
    draws = np.random.default_rng(0).integers(0, tasks, size=(2000, tasks))
    rows = []
    for name, outcome in outcomes.items():
        own, random = cost[name][placed_by_all], cost["random"][placed_by_all]
        row: dict[str, Any] = {
            "algorithm": name,
            "infeasible": int(np.isnan(cost[name]).sum()),
            "compared_tasks": int(placed_by_all.sum()),
            "mean_ms": None,
        }
        if len(own):
            low, high = np.quantile(random[draws].mean(axis=1) / own[draws].mean(axis=1), [0.025, 0.975])
            row |= {
                "mean_ms": float(own.mean()),
                "worst_ms": float(own.max()),
                "speedup_over_random": float(random.mean() / own.mean()),
                "speedup_interval": [float(low), float(high)],
                "plan_seconds": float(np.mean(outcome.plan_seconds)),
                "cost_ms": [None if np.isnan(value) else float(value) for value in cost[name]],
            }
        rows.append(row)
    return sorted(rows, key=lambda row: (row["mean_ms"] is None, row["mean_ms"] or 0.0))


def _print(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    titles = ("algorithm", "mean ms", "worst ms", "speedup\nover random", "95%\ninterval", "not\nplaced", "planning\ns")
    table = Table(*titles, box=None, header_style="bold")
    for row in record["algorithms"]:
        if row["mean_ms"] is None:
            table.add_row(row["algorithm"], "-", "-", "-", "-", str(row["infeasible"]), "-")
            continue
        low, high = row["speedup_interval"]
        table.add_row(
            row["algorithm"],
            f"{row['mean_ms']:.2f}",
            f"{row['worst_ms']:.2f}",
            f"{row['speedup_over_random']:.3f}",
            f"{low:.2f} - {high:.2f}",
            str(row["infeasible"]),
            f"{row['plan_seconds']:.2f}",
        )
    console = Console()
    console.print(table)
    compared = record["algorithms"][0]["compared_tasks"]
    console.print(
        f"{record['costs']} step costs; means over the {compared} of {record['tasks']} {record['split']} tasks that "
        f"every algorithm placed on {record['devices']} devices"
    )
