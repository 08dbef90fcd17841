"""`dlrm-autoshard explain PLAN`: who has what, why it is balanced or not, what limits it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_autoshard.commands.arguments import add_asked
from dlrm_autoshard.commands.planning import planner_of, task_of
from dlrm_autoshard.commands.table_pools import tables_of_run
from dlrm_autoshard.errors import UserError

if TYPE_CHECKING:
    from dlrm_autoshard.costs import RankCost
    from dlrm_autoshard.plan import PlanError, ShardingPlan
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.planner.result import PlanResult
    from dlrm_autoshard.planner.task import PlacementTask


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("explain", help="say who has what in a plan, and what limits it")
    parser.add_argument("plan", type=Path, metavar="PLAN|RUN", help="a plan file, or a run: its last plan")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="tables.json of `tables`: for a plan file")
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="memory for tables on each device")
    parser.add_argument("--fitted", type=Path, metavar="DIR", help="costs that `fit` left (default: the shipped ones)")
    add_asked(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dlrm_autoshard.plan import PlanError, ShardingPlan
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.records.plans import last_plan
    from dlrm_autoshard.report.plan_table import what_splits_would_save

    of_run, plan_file = None, arguments.plan
    if arguments.plan.is_dir():
        of_run, plan_file = tables_of_run(arguments.plan), last_plan(arguments.plan)
        pool = of_run.pool
    elif not arguments.plan.exists():
        raise UserError(f"there is no plan file and no run '{arguments.plan}'.")
    elif arguments.tables is None:
        raise UserError("a plan file needs --tables FILE: what its tables are like. `tables` makes one.")
    else:
        pool = TablePool.load(arguments.tables)
    plan = ShardingPlan.load(plan_file).ordered([table.name for table in pool.tables])
    task = task_of(pool, of_run, plan.world_size, arguments, may_split=bool(plan.split_tables))
    planner = planner_of("auto", 0, arguments.fitted, optimizer=task.splits.optimizer)
    costs = planner.predict(task, plan)
    better: PlanResult | PlanError
    try:
        better = planner.plan(task)
    except PlanError as error:  # no plan is as asked; this one is explained all the same
        better = error
    task = task.split_as(plan)
    pool, table_bytes = replace(pool, tables=task.tables, stats=task.stats), dict(task.table_bytes)
    sentences = explain(plan, pool, costs, table_bytes, task.topology.memory_bytes)
    try:
        replace(task, topology=replace(task.topology, memory_bytes=None)).check(plan)  # of memory it was said
    except PlanError as error:
        sentences.append(f"The plan is not as asked: {error}")
    sentences += why_split(task, plan, planner.step_costs(task))
    if isinstance(better, PlanError):
        sentences.append(f"The planner finds no plan: {better}")
    else:
        own = of_run is not None and of_run.config.tables.optimizer.per_part
        per_part = bool(plan.split_tables) and task.splits.optimizer == "rowwise_adagrad" and not own
        sentences.append(compare(plan, costs, better.plan, better.predicted_ms, per_part))
        splits = what_splits_would_save(better)
        if splits is not None:
            sentences.append(f"{splits[0].upper()}{splits[1:]}.")
    if arguments.json:
        record = {
            "plan": plan.to_json(),
            "predicted": [cost.to_json() for cost in costs],
            "explanation": sentences,
            "costs_from": planner.costs.costs_from,
        }
        print(json.dumps(record, indent=1))
        return 0
    from rich.console import Console

    from dlrm_autoshard.report.plan_table import rank_table

    console = Console()
    console.print(rank_table(plan, pool.tables, pool.stats, table_bytes, costs))
    for sentence in sentences:
        console.print(sentence, highlight=False, markup=False)
    console.print(f"costs from {planner.costs.costs_from}", highlight=False)
    return 0


def explain(
    plan: ShardingPlan,
    pool: TablePool,
    costs: Sequence[RankCost],
    table_bytes: dict[str, int],
    memory: Sequence[int] | None,
) -> list[str]:
    """Sentences: how balanced, which stage and rank the step waits for and for which table, what memory says."""
    from dlrm_autoshard.costs import PLANNED_STAGES, balanced_cost_ms, imbalance, step_cost_ms
    from dlrm_autoshard.formats.words import gib
    from dlrm_autoshard.plan import bytes_per_rank
    from dlrm_autoshard.tables import lookup_work

    step, bound = step_cost_ms(costs), balanced_cost_ms(costs)
    sentences = [
        f"The step costs {step:.2f} ms; spread evenly the same work would cost {bound:.2f} ms, so imbalance takes "
        f"{step - bound:.2f} ms ({100 * (step - bound) / step:.0f}%)."
    ]
    lost = {
        stage: max(c.stage(stage) for c in costs) - sum(c.stage(stage) for c in costs) / len(costs)
        for stage in PLANNED_STAGES
    }
    worst = max(lost, key=lambda stage: lost[stage])
    if lost[worst] > 0.01 * step:
        rank = max(range(len(costs)), key=lambda r: costs[r].stage(worst))
        values = [c.stage(worst) for c in costs]
        sentences.append(
            f"Most of that is {worst}: rank {rank} takes {values[rank]:.2f} ms, {imbalance(values):.2f} times the mean."
        )
        of = {t.name: (t, s) for t, s in zip(pool.tables, pool.stats, strict=True)}
        work = {name: lookup_work(t.embedding_dim, s.mean_pooling) for name, (t, s) in of.items()}
        heaviest = max(plan.tables_on(rank), key=lambda name: work[name], default=None)
        if heaviest is not None:
            table, stat = of[heaviest]
            share = work[heaviest] / max(sum(work[n] for n in plan.tables_on(rank)), 1e-12)
            sentences.append(
                f"Its heaviest table is '{heaviest}' (dim {table.embedding_dim}, {stat.mean_pooling:.1f} ids a "
                f"sample), "
                f"{100 * share:.0f}% of the rank's values looked up"
                f"{_alone_limits(heaviest) if share > 0.8 else '.'}"
            )
    else:
        sentences.append("No stage is out of balance by more than 1% of the step.")
    used = bytes_per_rank(plan, table_bytes)
    fullest = max(range(len(used)), key=lambda r: used[r] / (max(memory[r], 1) if memory else 1))  # of what it has
    if memory is None:
        sentences.append(f"The fullest rank is {fullest} with {gib(used[fullest])}.")
    elif used[fullest] > memory[fullest]:
        sentences.append(
            f"Rank {fullest} needs {gib(used[fullest])} but has {gib(memory[fullest])}: this plan does not fit."
        )
    else:
        sentences.append(
            f"The fullest rank is {fullest}: {gib(used[fullest])} of {gib(memory[fullest])}"
            + (", so memory leaves little choice." if used[fullest] > 0.9 * memory[fullest] else ".")
        )
    empty = [rank for rank in range(plan.world_size) if not plan.tables_on(rank)]
    if empty:
        sentences.append(f"{len(empty)} of {plan.world_size} ranks own no table.")
    return sentences


def _alone_limits(name: str) -> str:
    """Of a table, or a part of one, that is nearly all of the slowest rank's work."""
    from dlrm_autoshard.tables import Shard

    if Shard.parse(name).columns is None:
        return ": whole tables cannot be spread further, so this table alone limits the plan."
    return ": this part alone limits the plan, and only narrower parts would spread it further."


def why_split(task: PlacementTask, plan: ShardingPlan, step_ms: Callable[[ShardingPlan], float]) -> list[str]:
    """For each split table, that it fits no rank whole, or else what the step would cost with the table whole, on the
    best of the ranks that have a part. task: of the plan's shards."""
    from dlrm_autoshard.formats.words import gib
    from dlrm_autoshard.plan import ShardingPlan, bytes_per_rank

    sentences, now, memory = [], step_ms(plan), task.topology.memory_bytes
    most = None if memory is None else max(memory[rank] for rank in task.topology.usable_ranks)
    for table in plan.split_tables:
        parts = [str(part) for part in plan.parts_of(table)]
        widths = " + ".join(str(shard.embedding_dim) for shard in task.tables if shard.name in parts)
        said = f"'{table}' is split into {len(parts)} parts ({widths} columns): whole,"
        need = task.with_shards([task.shard(table)[0]]).table_bytes[table]
        if most is not None and need > most:
            sentences.append(f"{said} it would need {gib(need)}, and no rank has more than {gib(most)}.")
            continue
        others = {name: rank for name, rank in plan.rank_of.items() if name not in parts}
        wholes = [ShardingPlan({**others, table: rank}, plan.world_size) for rank in plan.ranks_of(table)]
        whole = min(map(step_ms, wholes))
        said += f" on one of their ranks, it would make the step cost {whole:.2f} ms instead of {now:.2f}"
        used = bytes_per_rank(ShardingPlan(others, plan.world_size), task.table_bytes)
        full = memory is not None and all(used[rank] + need > memory[rank] for rank in plan.ranks_of(table))
        sentences.append(f"{said}, and none of these has room for it." if full else f"{said}.")
    return sentences


def compare(
    plan: ShardingPlan, costs: Sequence[RankCost], better: ShardingPlan, better_ms: float, per_part: bool = False
) -> str:
    """per_part: tables may be split only because `plan` is told so."""
    from dlrm_autoshard.costs import step_cost_ms
    from dlrm_autoshard.formats.words import count
    from dlrm_autoshard.tables import Shard

    gain = 1 - better_ms / step_cost_ms(costs)
    if gain < 0.005:
        return "The planner finds nothing that is predicted to be more than 0.5% better."
    tables = {Shard.parse(move.table).table for move in plan.moves_to(better)}
    return (
        f"`dlrm-autoshard plan{' --per-part' if per_part else ''}` would move {count(len(tables), 'table')} for a "
        f"predicted {better_ms:.2f} ms ({100 * gain:.1f}% less)."
    )
