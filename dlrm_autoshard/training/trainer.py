"""Training: `Trainer.run` and `_train_epoch` are its rhythm, and its parts say the rest.

result = Trainer(config, runtime, run_dir).run()

Reading order: run_job.py -> `Trainer.run` -> `_train_epoch` -> `_train_step` -> distributed/step.py. A job's parts are
built in job.py; timetable.py says what is due when.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from dlrm_autoshard.config import Config
from dlrm_autoshard.data.batch import DataSource
from dlrm_autoshard.distributed.lookup.lookups import SentIds
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.distributed.step import NotFinite
from dlrm_autoshard.distributed.tracing import traced
from dlrm_autoshard.records.jsonl import forget_after
from dlrm_autoshard.records.run import RESULT
from dlrm_autoshard.training.callbacks import Callback, Factory, find_callbacks
from dlrm_autoshard.training.evaluations import Evaluations
from dlrm_autoshard.training.job import Job
from dlrm_autoshard.training.loss_watch import LossWatch
from dlrm_autoshard.training.opening import open_run
from dlrm_autoshard.training.random_state import random_state, restore_random_state
from dlrm_autoshard.training.run_log import RunLog
from dlrm_autoshard.training.saver import Saver
from dlrm_autoshard.training.stop_signals import Stopped, StopSignals
from dlrm_autoshard.training.timetable import Timetable, lr_scale


@dataclass(frozen=True)
class TrainResult:
    """metrics: of the last evaluation. run_dir: where records, checkpoints and report.html are."""

    steps: int
    metrics: Mapping[str, float]
    run_dir: Path


class Trainer:
    """A job that runs, and its parts: what it says, when it saves and evaluates, whether its loss is finite."""

    best_on_test: Mapping[str, float] | None = None

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        run_dir: Path,
        signals: StopSignals | None = None,
        checkpoint: Path | None = None,
        *,
        fall_back: bool = True,
        source: DataSource | None = None,
    ) -> None:
        """signals: those that end the job between two steps. checkpoint, fall_back, source: as a `Job` takes them."""
        factories: list[Factory] = []
        runtime.from_rank_0(lambda: factories.extend(find_callbacks(config.callbacks)))
        self.job = job = Job(config, runtime, run_dir, checkpoint, fall_back=fall_back, source=source)
        self.signals = signals or StopSignals()
        callbacks: list[Callback] = []
        random = random_state(runtime.device)
        runtime.from_rank_0(lambda: callbacks.extend(make(run_dir, config) for make in factories))
        restore_random_state(random, runtime.device)  # whatever they drew: they are made anew at each start
        self.log = RunLog(job, callbacks)
        self.watch = LossWatch(runtime, job.step, job.state)
        self.saver = Saver(job, self.log, self.watch, self.signals)
        self.evaluations = Evaluations(job, self.log, self.saver, self.signals)
        self.timetable = Timetable(job, self.evaluations)

    # -- the rhythm --------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """All epochs that are left, an evaluation after each, the test split's at the end."""
        position, due, evaluations = self.job.position, self.timetable, self.evaluations
        try:
            with self.log.display, self.log.timed("total"):
                self._begin()
                while not due.finished:
                    with self.signals.postponed():
                        self._train_epoch()
                        self.saver.end_if_asked()
                        if due.evaluation_due:
                            evaluations.evaluate(due.split_between_epochs)
                evaluations.evaluate("test")
                self.saver.finish()
                self.best_on_test = evaluations.evaluate_best()
        except Stopped as stopped:
            newest = self.job.checkpoints.newest()
            saved = f"--resume continues from {newest}." if newest else "There is no checkpoint of it."
            raise Stopped(stopped.number, f"after step {position.step}. {saved}") from None
        return TrainResult(position.step, evaluations.metrics, self.job.run_dir)

    def _train_epoch(self) -> None:
        """From the current position to the epoch's end, or to where the job ends before."""
        job, due = self.job, self.timetable
        position, intervals, samples = job.position, job.intervals, job.data.samples
        with job.data.batches("train", position.epoch, position.sample) as loader:
            batches = job.bags.ahead(loader, lambda batch: batch)
            intervals.begin(position.step)
            for batch, ids in batches:
                self._train_step(ids, sampled=due.batch_is_whole and intervals.is_sampled(position.step))
                inside = position.sample < samples
                intervals.after_step(
                    position.epoch, position.step, batch.size, due.steps_left,
                    whole=not inside or due.interval_due, tell=self.log.interval,
                )  # fmt: skip
                if inside and due.checkpoint_due:
                    self.saver.save()
                if inside and not due.out_of_steps and due.evaluation_due:
                    self.evaluations.evaluate(due.split_between_epochs)
                if due.finished or job.dense.stop_agreed:
                    break
        whole = position.sample >= samples
        stopped = not (whole or due.finished)
        if position.step > intervals.first_step and not stopped:
            intervals.end(position.epoch, position.step, due.steps_left, tell=self.log.interval)
        if whole:
            position.epoch, position.sample = position.epoch + 1, 0
        if stopped or due.checkpoint_due_after_epoch:
            self.saver.save()

    def _train_step(self, ids: SentIds, *, sampled: bool) -> None:
        """A step, and what follows from its loss: where it is not finite, nothing is learned if such batches are left
        out."""
        job, log, watch = self.job, self.log, self.watch
        config, position, batch = job.config, job.position, ids.batch
        scale = lr_scale(position.step, config.schedule)
        tracing = position.step in config.profile.trace_steps
        trace = job.run_dir / "traces" / f"step_{position.step:08d}_rank_{job.runtime.rank:05d}.json"
        job.dense.stop_asked = self.signals.received is not None
        if job.runtime.heartbeats is not None:
            job.runtime.heartbeats.step = position.step
        left_out, loss = False, None
        try:
            with traced(trace, job.clock) if tracing else nullcontext():
                job.step.run(ids, scale, config.tables.optimizer.lr * scale, sampled=sampled or tracing)
            if tracing:
                job.clock.forget_last()  # the profiler's own time is in it
        except NotFinite:
            left_out = True
        position.sample += batch.global_size
        position.step += 1
        logging = position.step % config.train.log_every_steps == 0
        if left_out:
            log.metrics("train", {"skipped_not_finite": 1.0})
            watch.left_out(position.step)
        else:
            watch.updated()
            if sampled and ids.arrived is not None:
                job.intervals.observe(ids.arrived, batch.global_size)
            if logging or job.runtime.device.type == "cpu":  # on a GPU looking at it makes the queue run dry
                loss = watch.check(position.step)
            if logging and loss is not None:
                watch.compare_replicas(position.step)
                plain = batch.loss_weights_B is None and batch.labels_B.ndim == 1
                name = "logloss" if plain else "loss"  # weighted, or summed over labels
                speed = log.display.progress(position.step, loss, job.data.global_batch)
                log.metrics("train", {name: loss, "examples_per_second": speed})
        log.display.step(loss)

    # -- before it and after it --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        job = self.job
        job.notes += job.runtime.from_rank_0(self._forget_what_comes_again)
        if job.runtime.rank == 0:
            open_run(self.log.display, job, finished=self.timetable.finished)
        for note in job.notes:
            self.log.line(note)
        if job.resumed_from is None and job.config.checkpoint.initial:
            self.saver.save()  # so that there is always a good one to name and to go back to
        if job.position.step and self.timetable.evaluation_due:  # after its checkpoint: a kill may have come between
            self.evaluations.evaluate(self.timetable.split_between_epochs)
        else:
            self.evaluations.know_best_again()

    def _forget_what_comes_again(self) -> list[str]:
        """On rank 0, for all ranks: there may be fewer now. Started again without a checkpoint, all comes again."""
        job = self.job
        forget_after(job.run_dir, -1 if job.resumed_from is None else job.position.step)
        (job.run_dir / RESULT).unlink(missing_ok=True)  # of an earlier start: this one has not finished
        return self.set_later_aside()

    def set_later_aside(self) -> list[str]:
        """Checkpoints of steps that are to come. On rank 0; sentences to say of them."""
        return self.job.checkpoints.set_aside_after(self.job.position.step)

    def write_report(self) -> None:
        """The result and the report, on rank 0, after training, which a signal that comes now does not take back."""
        with self.signals.postponed():
            self.log.finish(self.best_on_test)
