"""Logs a running job: terminal lines and bar, metrics.jsonl, callbacks, seconds by phase.

log = RunLog(job, callbacks)
with log.display, log.timed("evaluation"): log.metrics("val", {"auc": 0.79})
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm_autoshard.autoshard.asked import reshards
from dlrm_autoshard.autoshard.intervals import Ended
from dlrm_autoshard.data.open import found
from dlrm_autoshard.errors import UserError, in_a_sentence
from dlrm_autoshard.formats.whole_file import write_whole
from dlrm_autoshard.formats.words import count
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.plan.replicated import said_of
from dlrm_autoshard.planner.dreamshard.pool import TablePool
from dlrm_autoshard.plug_in import own_traceback
from dlrm_autoshard.records.folder import REPLACED, RunFolder
from dlrm_autoshard.records.interval import IntervalProfile
from dlrm_autoshard.records.jsonl import SCHEMA, append_jsonl, change_jsonl, lost_if_unwritable
from dlrm_autoshard.records.plans import TABLES, write_replicated
from dlrm_autoshard.records.run import RESULT, RunRecord
from dlrm_autoshard.report.drawing import last_page
from dlrm_autoshard.report.plan_table import (
    candidate_table,
    rank_table,
    tables_by_rank,
    what_splits_would_save,
    why_not_the_fastest,
)
from dlrm_autoshard.report.verdict import autoshard_in_one_line
from dlrm_autoshard.training.callbacks import Callback, metric_scalars, profile_scalars
from dlrm_autoshard.training.display import LOG, Display
from dlrm_autoshard.training.job import Job
from dlrm_autoshard.training.run_directory import changes_since_last_start
from dlrm_autoshard.training.selection import BestSoFar

_OF_MOVES = (
    *("step", "action", "moves", "bytes_moved", "predicted_gain"),
    *("measured_gain", "measured_low", "measured_high", "doubt"),
)
"""Keys of a decision that result.json keeps for each move."""


class Journal:
    """Writes a run's metrics and result, and calls callbacks; does nothing unless `active`."""

    def __init__(
        self, run_dir: Path, callbacks: Sequence[Callback] = (), *, active: bool, resumed_at: int | None = None
    ) -> None:
        """resumed_at: the step that an earlier start may have evaluated already."""
        self._run_dir, self._callbacks, self._active, self._resumed_at = run_dir, list(callbacks), active, resumed_at

    def metrics(self, step: int, epoch: int, split: str, metrics: Mapping[str, float]) -> None:
        if self._active:
            path, line = self._run_dir / "metrics.jsonl", {"step": step, "epoch": epoch, "split": split, **metrics}
            if step == self._resumed_at and split != "train":  # evaluated again: replace the earlier line
                earlier = (step, split)
                with lost_if_unwritable(path):
                    change_jsonl(path, lambda old: None if (old.get("step"), old.get("split")) == earlier else old)
            append_jsonl(path, line)
            self._tell(step, metric_scalars(line))

    def profile(self, record: IntervalProfile) -> None:
        """Passes an interval's stages to callbacks (`Intervals` writes the line)."""
        self._tell(record.end_step, profile_scalars(record))

    def finish(
        self,
        plan: ShardingPlan,
        seconds: Mapping[str, float],
        best: BestSoFar | None = None,
        best_on_test: Mapping[str, float] | None = None,
    ) -> list[str]:
        """Writes the result and the report. Returns last lines: what moves gained, and where the report is. A failure
        to write or draw becomes a line, as the model is trained all the same.

        seconds: by phase (`result.json` in SCHEMA.md). best: the best evaluation on val, if one is chosen.
        best_on_test: that checkpoint's test metrics, if it is not the last.
        """
        if not self._active:
            return []
        try:
            record = replace(RunRecord.read(self._run_dir), finished=True)
            result = result_of(record, plan, seconds, best, best_on_test)
            write_whole(self._run_dir / RESULT, json.dumps(result, indent=1) + "\n")
        except (UserError, OSError) as error:
            return [f"no {RESULT} and no report.html: {in_a_sentence(error) or error}"]
        self._call(lambda callback: callback.finish(result))
        _, report = last_page(self._run_dir, record)
        return [autoshard_in_one_line(record), report] if record.decisions else [report]

    def _tell(self, step: int, values: Mapping[str, float]) -> None:
        self._call(lambda callback: callback.scalars(step, values))

    def _call(self, tell: Callable[[Callback], None]) -> None:
        """Calls each callback; one that raises is dropped, and training goes on."""
        for callback in tuple(self._callbacks):
            try:
                tell(callback)
            except Exception as error:  # usually a service that is down
                self._callbacks.remove(callback)
                what = own_traceback(error) or f"{type(error).__name__}: {error}"
                LOG.warning("callbacks: %s failed and will not be called again: %s", type(callback).__name__, what)


def result_of(
    record: RunRecord,
    plan: ShardingPlan,
    seconds: Mapping[str, float],
    best: BestSoFar | None = None,
    best_on_test: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Returns result.json: a finished run in a small object, for scripts and sweeps."""
    split, metrics = record.final_metrics() or (None, {})
    moves = [d for d in record.decisions if d.get("action") in ("moved", "rolled_back")]
    speeds = [line["throughput"] for line in record.metrics_of("train") if "throughput" in line]
    known = ("schema", "step", "epoch", "split")
    return {
        "schema": SCHEMA,
        "name": record.name,
        "steps": max((int(line["step"]) for line in record.metrics), default=0),
        "split": split,
        "metrics": {name: value for name, value in metrics.items() if name not in known},
        "best": best and {"metric": best.metric, "value": best.value, "step": best.step, "test": best_on_test},
        "throughput": speeds[-1] if speeds else None,
        "plan": plan.to_json(),
        "moves": [{key: d.get(key) for key in _OF_MOVES} for d in moves],
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
    }


class RunLog:
    """Logs a job. seconds: of this start, by phase. write_start: writes on rank 0 what continuing the run needs."""

    def __init__(self, job: Job, callbacks: Sequence[Callback]) -> None:
        active, position = job.runtime.rank == 0, job.position
        resumed_at = None if job.resumed_from is None else position.step
        self.journal = Journal(job.run_dir, callbacks, active=active, resumed_at=resumed_at)
        self.display = Display(active, job.total_steps, position.step, job.config.run.log_level)
        self.seconds = dict.fromkeys(("total", "evaluation", "checkpoints", "resharding"), 0.0)
        self.write_start: Callable[[], None] = lambda: None
        self._job, self._folder = job, RunFolder(job.run_dir)

    def line(self, text: str) -> None:
        self.display.line(text)

    def metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        position = self._job.position
        self.keep_folder()
        self.journal.metrics(position.step, position.epochs_done, split, metrics)

    def interval(self, ended: Ended) -> None:
        """Logs an ended interval: what was measured, and the decision."""
        position, record = self._job.position, ended.record
        self.spent("resharding", ended.seconds)
        if record is not None:
            self.journal.profile(record)
            self.metrics("train", {"throughput": record.throughput, "step_ms": record.step_ms})
            self.line(
                f"epoch {position.epochs_done}  step {record.end_step}  {record.throughput:,.0f} examples/s  "
                f"loss {float(self._job.dense.global_loss):.4f}"
            )
        decision = ended.decision
        said = ended.noticed if decision is None else decision.text
        if said is not None:
            self.line(f"step {position.step}  {said}")

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.spent(phase, time.perf_counter() - started)

    def spent(self, phase: str, seconds: float) -> None:
        """Adds seconds to a phase and leaves them out of the interval's throughput and the displayed speed."""
        self.seconds[phase] += seconds
        self._job.intervals.exclude(seconds)
        self.display.exclude(seconds)

    def keep_folder(self) -> None:
        """Warns on rank 0 if the run's directory was renamed or removed, and makes it again."""
        run_dir = self._job.run_dir
        if self._job.runtime.rank == 0 and self._folder.was_replaced():
            LOG.warning(REPLACED, run_dir)
            with lost_if_unwritable(run_dir):
                run_dir.mkdir(parents=True, exist_ok=True)
                self.write_start()

    def finish(self, best_on_test: Mapping[str, float] | None) -> None:
        """Writes the result and the report, on rank 0, after training."""
        job, seconds = self._job, self.seconds
        seconds["training"] = 2 * seconds["total"] - sum(seconds.values())
        seconds |= job.start_seconds
        with self.display:
            for line in self.journal.finish(job.embeddings.plan, seconds, job.selection.best, best_on_test):
                self.line(line)


def open_run(display: Display, job: Job) -> None:
    """Prints and records the plan that a job runs under and why it was chosen. On rank 0."""
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
    """Returns warnings about settings that are allowed but surely unwanted."""
    config, samples, ranks = job.config, job.data.samples, job.runtime.world_size
    epoch, doubts = job.data.steps_of_epoch, []
    if samples < job.data.global_batch:
        doubts.append(
            f"A step takes {job.data.global_batch:,} samples ({config.train.batch_size:,} on each of {ranks} ranks), "
            f"but there are {samples:,}: an epoch is a single, smaller step. Lower train.batch_size."
        )
    if not reshards(config.autoshard, ranks):
        return doubts
    left, interval = job.total_steps - job.position.step, job.interval_steps
    if not config.profile.enabled:
        doubts.append("No table will move: nothing is measured (profile.enabled is false).")
    elif min(epoch, left) <= config.profile.warmup_steps:
        doubts.append(
            f"No table will move: an epoch has {count(min(epoch, left), 'step')}, and the first "
            f"{config.profile.warmup_steps} are never sampled (profile.warmup_steps)."
        )
    elif left <= interval:
        doubts.append(
            f"No table is likely to move: the first decision comes after {count(interval, 'step')}, and {left:,} are "
            "left. Lower autoshard.reshard.every_steps."
        )
    return doubts
