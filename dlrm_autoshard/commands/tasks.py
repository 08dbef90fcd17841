"""`dlrm-autoshard tasks`: draws training and test tasks that share no table from tables.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dlrm_autoshard.commands.arguments import add_output, positive, seed
from dlrm_autoshard.errors import UserError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("tasks", help="draw placement tasks from disjoint halves of a pool of tables")
    parser.add_argument("--tables", type=Path, required=True, metavar="FILE", help="tables.json of `tables`")
    parser.add_argument("--tables-per-task", type=int, default=50, help="default: %(default)s")
    parser.add_argument(
        "--count", type=int, default=50, help="training tasks, and as many test tasks (default: %(default)s)"
    )
    parser.add_argument("--batch-size", type=positive, help="global batch (default: the tables' own)")
    parser.add_argument("--seed", type=seed, default=0)
    add_output(parser, "tasks.json, for `fit` and `compare-planners`", required=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dlrm_autoshard.formats.words import count
    from dlrm_autoshard.planner.dreamshard.drawn_tasks import draw_tasks
    from dlrm_autoshard.planner.dreamshard.pool import TablePool

    for name in ("tables_per_task", "count"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be 1 or more.")
    pool = TablePool.load(arguments.tables)
    batch_size = arguments.batch_size or pool.stats[0].batch_size
    tasks = draw_tasks(pool, arguments.tables_per_task, arguments.count, arguments.seed, batch_size)
    tasks.save(arguments.out)
    summary = {
        "train_tasks": len(tasks.train_indices),
        "test_tasks": len(tasks.test_indices),
        "tables_per_task": arguments.tables_per_task,
        "train_tables": len({table for task in tasks.train_indices for table in task}),
        "test_tables": len({table for task in tasks.test_indices for table in task}),
        "batch_size": batch_size,
        "out": str(arguments.out),
    }
    if arguments.json:
        print(json.dumps(summary, indent=1))
    else:
        print(
            f"{count(len(tasks.train_indices), 'training task')} over {count(summary['train_tables'], 'table')}, "
            f"{count(len(tasks.test_indices), 'test task')} over {summary['test_tables']} other, "
            f"{count(arguments.tables_per_task, 'table')} each, batch {batch_size:,}: {arguments.out}"
        )
    return 0
