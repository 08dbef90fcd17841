"""What a job says, and writes down, before its first step: under which plan it runs, and on what evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dlrm_autoshard.autoshard.initial_plan import Placement
from dlrm_autoshard.report.plan_table import candidate_table, rank_table, tables_by_rank, why_not_the_fastest
from dlrm_autoshard.tables import TableConfig, TableStats
from dlrm_autoshard.train.display import Display
from dlrm_autoshard.train.start_record import changes_since_last_start


def open_run(
    display: Display,
    run_dir: Path,
    placement: Placement,
    tables: Sequence[TableConfig],
    stats: Sequence[TableStats],
    *,
    step: int,
    steps: str,
    finished: bool,
) -> None:
    """On rank 0. steps: what there is to do, in words. finished: all of it is done."""
    resumed = f", resumed at step {step}" + (": nothing is left to do" if finished else "") if step else ""
    ranks = placement.plan.world_size
    display.line(f"{len(tables)} tables on {ranks} rank(s), {steps}{resumed}; run directory {run_dir}")
    changes = changes_since_last_start(run_dir)
    if changes:
        display.line(f"changed since its last start: {', '.join(changes)}")
    result = placement.result
    placement.save(run_dir, step)
    predicted = None if result is None else result.predicted
    task = replace(placement.task, stats=tuple(stats)).split_as(placement.plan)
    budget = task.topology.memory_bytes
    display.show(rank_table(placement.plan, task.tables, task.stats, task.table_bytes, predicted, budget))
    for line in tables_by_rank(placement.plan, task.tables, task.stats):
        display.line(line)
    if result is not None:
        display.show(candidate_table(result))
        reason = why_not_the_fastest(result)
        if reason is not None:
            display.line(reason)
        display.line(f"planned in {result.seconds:.1f} s by '{result.algorithm}'")
