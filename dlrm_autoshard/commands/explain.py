"""`dlrm-autoshard explain PLAN`: says which rank has which tables, how balanced that is, and what limits it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_autoshard.commands.arguments import add_asked
from dlrm_autoshard.commands.planning import learn_from, planner_of, task_of
from dlrm_autoshard.commands.table_pools import tables_of_run
from dlrm_autoshard.errors import UserError

if TYPE_CHECKING:
    from dlrm_autoshard.costs import RankCost
    from dlrm_autoshard.plan import PlanError, ShardingPlan
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.planner.result import Gain, PlanResult
    from dlrm_autoshard.planner.task import PlacementTask
    from dlrm_autoshard.records.run import RunRecord


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("explain", help="say which rank has which tables in a plan, and what limits it")
    parser.add_argument("plan", type=Path, metavar="PLAN|RUN", help="a plan file, or a run: its last plan")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="tables.json of `tables`: for a plan file")
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="memory for tables on each device")
    parser.add_argument("--fitted", type=Path, metavar="DIR", help="costs made by `fit` (default: the shipped ones)")
    add_asked(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dlrm_autoshard.costs import step_cost_ms
    from dlrm_autoshard.plan import PlanError, ShardingPlan
    from dlrm_autoshard.plan.replicated import said_of
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.planner.result import Gain
    from dlrm_autoshard.records.plans import last_plan
    from dlrm_autoshard.records.run import RunRecord
    from dlrm_autoshard.report.plan_table import what_splits_would_save

    of_run, plan_file = None, arguments.plan
    if arguments.plan.is_dir():
        of_run, plan_file = tables_of_run(arguments.plan), last_plan(arguments.plan)
        pool = of_run.pool
    elif not arguments.plan.exists():
        raise UserError(f"there is no plan file and no run '{arguments.plan}'.")
    elif arguments.tables is None:
        raise UserError(
            "a plan file needs --tables FILE, which describes its tables. `dlrm-autoshard tables` makes one."
        )
    else:
        pool = TablePool.load(arguments.tables)
    plan = ShardingPlan.load(plan_file).ordered([table.name for table in pool.tables])
    task = task_of(pool, of_run, plan.world_size, arguments, may_split=bool(plan.split_tables))
    fitted, made_otherwise = (arguments.fitted, None) if of_run else costs_asked(plan_file, arguments.fitted)
    planner = planner_of("auto", 0, fitted, optimizer=task.splits.optimizer)
    measured, step_part, replicated = list[str](), 1.0, tuple[str, ...]()
    if of_run is not None:
        record = RunRecord.load(arguments.plan)
        learn_from(planner, record, of_run, task)
        replicated = record.replicated
        if record.reported.plan == plan and (measured := measured_of(record)):
            step_part = step_cost_ms(record.reported.measured) / max(record.reported.mean_step_ms, 1e-9)
    costs = planner.predict(task, plan)
    better: PlanResult | PlanError
    gain = Gain(0.0, 0.0)
    try:
        better = planner.plan(task)
        [gain] = planner.gains(task, plan, [better.plan])
    except PlanError as error:  # no plan meets the constraints; explain the given one all the same
        better = error
    task = task.split_as(plan)
    pool, table_bytes = replace(pool, tables=task.tables, stats=task.stats), dict(task.table_bytes)
    sentences = measured or predicted_of(plan, pool, costs)
    sentences += [f"{said_of(replicated)}."] if replicated else []
    sentences += memory_of(plan, table_bytes, task.topology.memory_bytes)
    if made_otherwise:
        sentences.append(made_otherwise)
    try:
        replace(task, topology=replace(task.topology, memory_bytes=None)).check(plan)  # memory_of covers memory
    except PlanError as error:
        sentences.append(f"The plan breaks a constraint: {error}")
    sentences += why_split(task, plan, planner.step_costs(task))
    if isinstance(better, PlanError):
        sentences.append(f"The planner finds no plan: {better}")
    else:
        own = of_run is not None and of_run.config.tables.optimizer.per_part
        per_part = bool(plan.split_tables) and task.splits.optimizer == "rowwise_adagrad" and not own
        gain = Gain(gain.mean * step_part, gain.std * step_part)
        sentences.append(compare(plan, better.plan, gain, "a step" if measured else "these stages", per_part))
        splits = what_splits_would_save(better)
        if splits is not None:
            sentences.append(f"{splits[0].upper()}{splits[1:]}.")
    if arguments.json:
        found = {
            "plan": plan.to_json(),
            "predicted": [cost.to_json() for cost in costs],
            "explanation": sentences,
            "costs_from": planner.costs.costs_from,
        }
        print(json.dumps(found, indent=1))
        return 0
    from rich.console import Console

    from dlrm_autoshard.report.plan_table import rank_table

    console = Console()
    console.print(rank_table(plan, pool.tables, pool.stats, table_bytes, costs))
    for sentence in sentences:
        console.print(sentence, highlight=False, markup=False)
    console.print(f"costs from {planner.costs.costs_from}", highlight=False)
    return 0


def costs_asked(plan_file: Path, fitted: Path | None) -> tuple[Path | None, str | None]:
    """Returns the directory of costs for a plan file: --fitted, else the one the plan was made with; and a sentence if
    the two differ."""
    from dlrm_autoshard.plan import costs_of_plan

    made_by = costs_of_plan(plan_file)
    if made_by is None:
        return fitted, None
    of_plan = None if made_by["fitted"] is None else Path(made_by["fitted"])
    if fitted is None and of_plan is not None and of_plan.is_dir():
        return of_plan, None
    asked = None if fitted is None else fitted.resolve()
    if asked == of_plan:
        return fitted, None
    where = "the shipped costs" if of_plan is None else f"'{of_plan}'"
    return fitted, f"The plan was made with other costs than these: {made_by['costs_from']} ({where})."


def measured_of(record: RunRecord) -> list[str]:
    """Returns what the run's last interval measured under the plan, in the sentences of `report`."""
    from dlrm_autoshard.records.diagnosis import describe_straggler
    from dlrm_autoshard.report.verdict import left_to_save

    return [sentence for sentence in (describe_straggler(record.reported), *left_to_save(record)) if sentence]


def predicted_of(plan: ShardingPlan, pool: TablePool, costs: Sequence[RankCost]) -> list[str]:
    """Describes a plan by predicted costs: its imbalance, the stage and rank that cause most of it, and the table."""
    from dlrm_autoshard.costs import PLANNED_STAGES, balanced_cost_ms, imbalance, step_cost_ms
    from dlrm_autoshard.records.diagnosis import alone_limits, shares_of_stage
    from dlrm_autoshard.records.facts import TableUse

    step, bound = step_cost_ms(costs), balanced_cost_ms(costs)
    sentences = [
        f"These stages are predicted to cost {step:.2f} ms a step; perfectly balanced they would cost {bound:.2f} ms, "
        f"so imbalance takes {step - bound:.2f} ms ({100 * (step - bound) / step:.0f}%)."
    ]
    lost = {
        stage: max(c.stage(stage) for c in costs) - sum(c.stage(stage) for c in costs) / len(costs)
        for stage in PLANNED_STAGES
    }
    worst = max(lost, key=lambda stage: lost[stage])
    if lost[worst] <= 0.01 * step:
        return [*sentences, "No stage is predicted to lose more than 1% of that to imbalance."]
    rank = max(range(len(costs)), key=lambda r: costs[r].stage(worst))
    values = [c.stage(worst) for c in costs]
    sentences.append(
        f"Most of that is {worst}: rank {rank} takes {values[rank]:.2f} ms, {imbalance(values):.2f} times the mean."
    )
    uses = [
        TableUse(table.name, plan.rank_of[table.name], table.num_embeddings, table.embedding_dim, table.weight_bytes,
                 stat.mean_pooling, stat.mean_reuse, stat.features)
        for table, stat in zip(pool.tables, pool.stats, strict=True)
    ]  # fmt: skip
    shares = shares_of_stage(uses, rank, worst)
    if shares:
        name, share = shares[0]
        use = next(use for use in uses if use.name == name)
        sentences.append(
            f"Its costliest table there is '{name}' (dim {use.embedding_dim}, {use.mean_pooling:.1f} ids a sample), "
            f"{share:.0%} of the rank's work{alone_limits(shares)}."
        )
    return sentences


def memory_of(plan: ShardingPlan, table_bytes: dict[str, int], memory: Sequence[int] | None) -> list[str]:
    """Describes the memory that tables take on the fullest rank, and whether they fit."""
    from dlrm_autoshard.formats.words import gib
    from dlrm_autoshard.plan import bytes_per_rank

    sentences = []
    used = bytes_per_rank(plan, table_bytes)
    fullest = max(range(len(used)), key=lambda r: used[r] / (max(memory[r], 1) if memory else 1))
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
    empty = [rank for rank in range(plan.world_size) if not plan.shards_on(rank)]
    if empty:
        sentences.append(f"{len(empty)} of {plan.world_size} ranks own no table.")
    return sentences


def why_split(task: PlacementTask, plan: ShardingPlan, step_ms: Callable[[ShardingPlan], float]) -> list[str]:
    """Returns a sentence per split table: it fits no rank whole, or what the step would cost with it whole on the best
    of its ranks. task: has the plan's shards."""
    from dlrm_autoshard.formats.words import gib
    from dlrm_autoshard.plan import ShardingPlan, bytes_per_rank
    from dlrm_autoshard.tables import Shard

    sentences, now, memory = [], step_ms(plan), task.topology.memory_bytes
    most = None if memory is None else max(memory[rank] for rank in task.topology.usable_ranks)
    for table in plan.split_tables:
        parts = plan.parts_of(table)
        widths = " + ".join(str(shard.embedding_dim) for shard in task.tables if shard.name in parts)
        said = f"'{table}' is split into {len(parts)} shards ({widths} columns): whole,"
        need = task.with_shards([task.shard(Shard(table))[0]]).table_bytes[table]
        if most is not None and need > most:
            sentences.append(f"{said} it would need {gib(need)}, and no rank has more than {gib(most)}.")
            continue
        others = {name: rank for name, rank in plan.rank_of.items() if name not in parts}
        wholes = [ShardingPlan({**others, table: rank}, plan.world_size) for rank in plan.ranks_of(table)]
        whole = min(map(step_ms, wholes))
        said += f" on one of their ranks, it would make the step cost {whole:.2f} ms instead of {now:.2f}"
        used = bytes_per_rank(ShardingPlan(others, plan.world_size), task.table_bytes)
        full = memory is not None and all(used[rank] + need > memory[rank] for rank in plan.ranks_of(table))
        sentences.append(f"{said}, and none of them has room for it." if full else f"{said}.")
    return sentences


def compare(plan: ShardingPlan, better: ShardingPlan, gain: Gain, of_what: str, per_part: bool = False) -> str:
    """Describes the saving of the planner's own plan, with its 90% interval. per_part: the planner needs --per-part to
    split tables as `plan` does."""
    from dlrm_autoshard.formats.words import count
    from dlrm_autoshard.records.decisions import interval_in_words
    from dlrm_autoshard.records.diagnosis import NINETY

    low, high = gain.mean - NINETY * gain.std, gain.mean + NINETY * gain.std
    if gain.mean < 0.005:
        return "The planner finds no plan that is predicted to be more than 0.5% better."
    told = interval_in_words(gain.mean, low, high)
    if low <= 0:
        return f"The planner finds no plan that is surely better: the best is predicted to save {told} of {of_what}."
    tables = {move.shard.table for move in plan.moves_to(better)}
    return (
        f"`dlrm-autoshard plan{' --per-part' if per_part else ''}` would move {count(len(tables), 'table')}, which is "
        f"predicted to save {told} of {of_what}."
    )
