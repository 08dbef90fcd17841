"""What a job says, and writes down, before its first step: under which plan it runs, and on what evidence."""

from __future__ import annotations

from dataclasses import replace

from dlrm_autoshard.data.open import found
from dlrm_autoshard.planner.dreamshard.pool import TablePool
from dlrm_autoshard.records.jsonl import lost_if_unwritable
from dlrm_autoshard.records.plans import TABLES
from dlrm_autoshard.report.plan_table import (
    candidate_table,
    rank_table,
    tables_by_rank,
    what_splits_would_save,
    why_not_the_fastest,
)
from dlrm_autoshard.train.display import Display
from dlrm_autoshard.train.job import Job
from dlrm_autoshard.train.start_record import changes_since_last_start


def open_run(display: Display, job: Job, *, finished: bool) -> None:
    """On rank 0. finished: all of it is done."""
    placement, step, run_dir = job.placement, job.position.step, job.run_dir
    resumed = f", resumed at step {step}" + (": nothing is left to do" if finished else "") if step else ""
    display.line(
        f"{len(job.embeddings.tables)} tables on {job.runtime.world_size} rank(s), {job.total_steps} steps of "
        f"{job.global_batch} examples{resumed}; run directory {run_dir}"
    )
    display.line(found(job.source))
    changes = changes_since_last_start(run_dir)
    if changes:
        display.line(f"changed since its last start: {', '.join(changes)}")
    result = placement.result
    placement.save(run_dir, step)
    with lost_if_unwritable(run_dir / TABLES):
        TablePool(tuple(placement.task.tables), tuple(placement.task.stats)).save(run_dir / TABLES)
    predicted = None if result is None else result.predicted
    task = replace(placement.task, stats=job.intervals.stats).split_as(placement.plan)
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
        splits = what_splits_would_save(result)
        if splits is not None:
            display.line(splits)
