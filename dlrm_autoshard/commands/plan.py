"""`dlrm-autoshard plan`: plans the tables of a run or a file, and shows the candidates it chose from."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_autoshard.commands.arguments import (
    ALGORITHM_NAMES,
    add_asked,
    add_devices,
    add_output,
    check_out,
    positive,
    seconds,
    seed,
    write_json,
)
from dlrm_autoshard.commands.planning import learn_from, planner_of, task_of
from dlrm_autoshard.commands.table_pools import pool_of_modules, tables_of_run
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.progress import elapsing

if TYPE_CHECKING:
    from dlrm_autoshard.planner.result import PlanResult
    from dlrm_autoshard.planner.task import PlacementTask


_GUESSED_BATCH = 65536
"""Samples to draw ids for if a TorchRec module comes without statistics."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("plan", help="place the tables of a run, or of a file, on devices")
    parser.add_argument(
        "of_run",
        nargs="?",
        type=Path,
        metavar="RUN",
        help="a run: its tables and settings (default devices: its ranks)",
    )
    parser.add_argument("--tables", type=Path, metavar="FILE", help="tables.json made by `tables`, instead of a run")
    parser.add_argument(
        "--from-torchrec",
        type=Path,
        metavar="FILE",
        help="module.json made by dlrm_autoshard.torchrec.save_modules, instead of a run",
    )
    add_devices(parser, required=False)
    known = f"{ALGORITHM_NAMES}; or a directory made by `fit`"
    parser.add_argument("--algorithm", default="auto", metavar="NAME|DIR", help=known)
    parser.add_argument("--fitted", type=Path, metavar="DIR", help="costs made by `fit` (default: the shipped ones)")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="device of the tables, which chooses the shipped costs"
    )
    add_asked(parser)
    parser.add_argument(
        "--per-part", action="store_true", help="rowwise_adagrad: split tables, with a sum per shard's row"
    )
    parser.add_argument("--measure", action="store_true", help="measure auto's finalists with fbgemm here")
    parser.add_argument("--budget-seconds", type=seconds, metavar="S", help="stop searching after S seconds")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument(
        "--format", choices=["autoshard", "torchrec"], default="autoshard", help="format of --out and --json"
    )
    parser.add_argument(
        "--module", default="embedding_bag_collection", help="torchrec: path of the EmbeddingBagCollection"
    )
    parser.add_argument("--ranks-per-host", type=positive, metavar="N", help="torchrec: GPUs per host (default: all)")
    add_output(parser, "the plan; `autoshard.placement: FILE` starts a job with it; torchrec: JSON, or FILE.py")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dlrm_autoshard.plan import ShardingPlan
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.planner.planner import ALGORITHMS
    from dlrm_autoshard.probe.measured import Costs
    from dlrm_autoshard.records.plans import last_plan, replicated_in
    from dlrm_autoshard.records.run import RunRecord
    from dlrm_autoshard.torchrec.module_file import Modules, load_modules, shapes_in
    from dlrm_autoshard.torchrec.plan_format import python_source
    from dlrm_autoshard.torchrec.sharding import plan_record

    check_out(arguments.out)
    modules: Modules | None = None
    of_run = None
    if sum(given is not None for given in (arguments.of_run, arguments.tables, arguments.from_torchrec)) != 1:
        raise UserError("give either a run, or --tables FILE, or --from-torchrec FILE.")
    if arguments.of_run is not None:
        if arguments.devices is None:
            arguments.devices = ShardingPlan.load(last_plan(arguments.of_run)).world_size
        of_run = tables_of_run(arguments.of_run)
        pool = of_run.pool
    elif arguments.devices is None:
        raise UserError("--devices N is missing: the number of ranks to place the tables on.")
    elif arguments.from_torchrec is not None:
        arguments.format, modules = "torchrec", load_modules(arguments.from_torchrec)
        pool = pool_of_modules(modules, arguments.batch_size or _GUESSED_BATCH, arguments.seed, arguments.json)
    else:
        pool = TablePool.load(arguments.tables)
    if arguments.measure and arguments.algorithm != "auto":
        raise UserError(
            f"--measure chooses among the finalists of `auto`, and '{arguments.algorithm}' makes a single plan. Leave "
            "--measure out, or use --algorithm auto (--fitted DIR gives it costs made by `fit`)."
        )
    if arguments.measure and arguments.device != "cpu":
        raise UserError(
            "--measure times lookups on this machine's CPU, but --device puts the tables on GPUs. Leave one of them "
            "out; a job measures its finalists on its own ranks."
        )
    task = task_of(pool, of_run, arguments.devices, arguments, may_split=arguments.per_part)
    planner = planner_of(
        arguments.algorithm,
        arguments.seed,
        arguments.fitted,
        optimizer=task.splits.optimizer,
        device=arguments.device,
    )
    if arguments.of_run is not None and of_run is not None:
        learn_from(planner, RunRecord.load(arguments.of_run), of_run, task)
    costs = Costs("measured", planner.costs.exchange)
    with elapsing("planning", arguments.budget_seconds, quiet=arguments.json):
        result = planner.plan(
            task,
            measure=(lambda plans: costs.measure(task, plans)) if arguments.measure else None,
            budget_seconds=arguments.budget_seconds,
        )
    if arguments.format == "torchrec":
        copies = () if arguments.of_run is None else replicated_in(arguments.of_run)
        shapes = {arguments.module: (*pool.tables, *copies)} if modules is None else shapes_in(modules)
        numbers = range(arguments.devices)
        local_ranks = [rank % (arguments.ranks_per_host or arguments.devices) for rank in numbers]
        record: dict[str, Any] = plan_record(
            result.plan, shapes, arguments.device, local_ranks, {table.name for table in copies}
        )
        if arguments.out is not None and arguments.out.suffix == ".py":
            arguments.out.write_text(python_source(record))
        else:
            write_json(arguments.out, record)
    else:
        record = result.to_json()
        if arguments.out is not None:
            fitted = arguments.fitted if arguments.algorithm in ALGORITHMS else Path(arguments.algorithm)
            where = None if fitted is None else str(fitted.resolve())
            result.plan.save(arguments.out, {"costs_from": result.costs_from, "fitted": where})
    if arguments.json:
        print(json.dumps(record, indent=1))
    else:
        _print(result, task.split_as(result.plan))
        if arguments.out is not None:
            print(f"written to {arguments.out}")
    return 0


def _print(result: PlanResult, task: PlacementTask) -> None:
    """Prints the plan, its candidates and its predicted cost. task: has the plan's shards."""
    from rich.console import Console

    from dlrm_autoshard.costs import balanced_cost_ms
    from dlrm_autoshard.report.plan_table import candidate_table, rank_table, what_splits_would_save

    console = Console()
    console.print(rank_table(result.plan, task.tables, task.stats, task.table_bytes, result.predicted))
    console.print(candidate_table(result))
    bound = balanced_cost_ms(result.predicted)
    console.print(
        f"{result.chosen.name}: predicted step cost {result.predicted_ms:.2f} ms, "
        f"{100 * (result.predicted_ms / bound - 1):.1f}% above perfect balance, batch {task.batch_size:,}, "
        f"{result.seconds:.2f} s of planning"
    )
    splits = what_splits_would_save(result)
    if splits is not None:
        console.print(splits, highlight=False, markup=False)
    console.print(f"costs from {result.costs_from}", highlight=False)
