"""Says, and writes down, before a job's first step, under which plan it runs and on what evidence."""

from __future__ import annotations

from dataclasses import replace

from dlrm_autoshard.autoshard.asked import reshards
from dlrm_autoshard.data.open import found
from dlrm_autoshard.formats.words import count
from dlrm_autoshard.plan.replicated import said_of
from dlrm_autoshard.planner.dreamshard.pool import TablePool
from dlrm_autoshard.records.jsonl import lost_if_unwritable
from dlrm_autoshard.records.plans import TABLES, write_replicated
from dlrm_autoshard.report.plan_table import (
    candidate_table,
    rank_table,
    tables_by_rank,
    what_splits_would_save,
    why_not_the_fastest,
)
from dlrm_autoshard.training.display import Display
from dlrm_autoshard.training.job import Job
from dlrm_autoshard.training.run_directory import changes_since_last_start


def open_run(display: Display, job: Job) -> None:
    """On rank 0."""
    placement, step, run_dir = job.placement, job.position.step, job.run_dir
    resumed = f", resumed at step {step}" + (": nothing is left to do" if job.finished else "") if step else ""
    display.line(
        f"{len(job.embeddings.features.tables)} tables on {job.runtime.world_size} rank(s), {job.total_steps} steps of "
        f"{job.data.global_batch} examples{resumed}; run directory {run_dir}"
    )
    display.line(found(job.data.source))
    changes = changes_since_last_start(run_dir)
    if changes:
        display.line(f"changed since its last start: {', '.join(changes)}")
    display.line(f"placement: {placement.why}")
    result = placement.result
    copies = job.embeddings.replicated
    if copies:
        display.line(said_of([table.name for table in copies]))
    placement.save(run_dir, step)
    write_replicated(run_dir, copies)
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
        splits = what_splits_would_save(result)
        if splits is not None:
            display.line(splits)
    for doubt in [] if job.finished else doubts_of(job):
        display.line(doubt)


def doubts_of(job: Job) -> list[str]:
    """Returns sentences about settings that are allowed, and surely not what is wanted."""
    config, samples, ranks = job.config, job.data.samples, job.runtime.world_size
    epoch, doubts = job.data.steps_of_epoch, []
    if samples < job.data.global_batch:
        doubts.append(
            f"A step takes {job.data.global_batch:,} samples ({config.train.batch_size:,} on each of {ranks} ranks), "
            f"and there are {samples:,}: an epoch is one step, of fewer. Lower train.batch_size."
        )
    if not reshards(config.autoshard, ranks):
        return doubts
    left, interval = job.total_steps - job.position.step, job.interval_steps
    if not config.profile.enabled:
        doubts.append("No table will move: nothing is measured (profile.enabled is false).")
    elif min(epoch, left) <= config.profile.warmup_steps:
        doubts.append(
            f"No table will move: an epoch has {count(min(epoch, left), 'step')}, and the first "
            f"{config.profile.warmup_steps} are never measured (profile.warmup_steps)."
        )
    elif left <= interval:
        doubts.append(
            f"No table is likely to move: that is decided after {count(interval, 'step')}, and {left:,} are left. "
            "Set autoshard.reshard.every_steps to less."
        )
    return doubts
