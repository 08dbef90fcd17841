"""The training loop: `Trainer.run`, whose parts decide themselves when they are due.

result = Trainer(config, runtime, run_dir).run()

Reading order: train.py -> `Trainer.run` -> `_train_step` -> distributed/step.py. job.py builds the parts of a job.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from dlrm_autoshard.config import Config, ScheduleConfig
from dlrm_autoshard.data.batch import DataSource
from dlrm_autoshard.distributed.lookup.lookups import SentIds
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.distributed.step import NotFinite
from dlrm_autoshard.distributed.tracing import traced
from dlrm_autoshard.records.jsonl import forget_after
from dlrm_autoshard.records.run import RESULT
from dlrm_autoshard.training.callbacks import Callback, Factory, find_callbacks
from dlrm_autoshard.training.evaluation import Evaluations
from dlrm_autoshard.training.job import Job
from dlrm_autoshard.training.random_state import random_state, restore_random_state
from dlrm_autoshard.training.run_log import RunLog, open_run
from dlrm_autoshard.training.saver import Saver
from dlrm_autoshard.training.state import TrainError
from dlrm_autoshard.training.stop_signals import Stopped, StopSignals

_MOST_LEFT_OUT = 10  # losses in a row that are not finite; then the weights are bad, and skipping cannot help


@dataclass(frozen=True)
class TrainResult:
    """Result of a job. metrics: of the last evaluation. run_dir: has records, checkpoints and report.html."""

    steps: int
    metrics: Mapping[str, float]
    run_dir: Path


class Trainer:
    """Runs a job: trains, logs, saves and evaluates."""

    _left_out = 0
    """Batches skipped in a row."""

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
        """signals: end the job between two steps. checkpoint, fall_back, source: as in `Job`."""
        factories: list[Factory] = []
        runtime.from_rank_0(lambda: factories.extend(find_callbacks(config.callbacks)))
        self.job = job = Job(config, runtime, run_dir, checkpoint, fall_back=fall_back, source=source)
        self.signals = signals or StopSignals()
        callbacks: list[Callback] = []
        random = random_state(runtime.device)
        runtime.from_rank_0(lambda: callbacks.extend(make(run_dir, config) for make in factories))
        restore_random_state(random, runtime.device)  # callbacks may draw, and are made again at each start
        self.log = RunLog(job, callbacks)
        self.saver = Saver(job, self.log, self.signals)
        self.evaluations = Evaluations(job, self.log, self.saver, self.signals)

    def run(self) -> TrainResult:
        """Trains to the job's end, evaluating after each epoch, and finally on the test split."""
        job, log, saver, evaluations = self.job, self.log, self.saver, self.evaluations
        position, intervals = job.position, job.intervals
        with self._stopped_with_advice(), log.display, log.timed("total"):
            self._begin()
            while not job.finished:
                with self.signals.postponed(), job.data.batches("train", position.epoch, position.sample) as loader:
                    intervals.begin(position.step)
                    for batch, ids in job.bags.ahead(loader, lambda batch: batch):
                        self._train_step(ids)
                        intervals.after_step(
                            position.epochs_done, position.step, batch.size, job.steps_left,
                            whole=job.interval_due, tell=log.interval,
                        )  # fmt: skip
                        if saver.due:
                            saver.save()
                        if position.sample == 0 or job.finished or job.dense.stop_agreed:
                            saver.end_if_asked()
                        if evaluations.due:
                            evaluations.evaluate()
                        if job.finished:
                            break
                    if position.step > intervals.first_step:  # an evaluation has ended the job within an interval
                        intervals.end(position.epochs_done, position.step, job.steps_left, tell=log.interval)
                        saver.save()
            evaluations.evaluate("test")
            saver.finish()
            evaluations.evaluate_best()
        return TrainResult(position.step, evaluations.metrics, job.run_dir)

    def _train_step(self, ids: SentIds) -> None:
        """Trains on a batch and checks its loss: if it is not finite, skips the batch or ends the job."""
        job, log = self.job, self.log
        config, position, batch = job.config, job.position, ids.batch
        whole = position.sample + job.data.global_batch <= job.data.samples  # a smaller batch's times do not compare
        sampled = whole and job.intervals.is_sampled(position.step)
        scale = lr_scale(position.step, config.schedule)
        tracing = position.step in config.profile.trace_steps
        trace = job.run_dir / "traces" / f"step_{position.step:08d}_rank_{job.runtime.rank:05d}.json"
        job.dense.stop_asked = self.signals.received is not None
        if job.runtime.heartbeats is not None:
            job.runtime.heartbeats.step = position.step
        loss = None
        try:
            with traced(trace, job.clock) if tracing else nullcontext():
                job.step.run(ids, scale, config.tables.optimizer.lr * scale, sampled=sampled or tracing)
            if tracing:
                job.clock.forget_last()  # its times include the profiler's
            self._left_out = 0
        except NotFinite:
            self._left_out += 1
        position.advance(batch.global_size, job.data.samples)
        logging = position.step % config.train.log_every_steps == 0
        if self._left_out:
            log.metrics("train", {"skipped_not_finite": 1.0})
            if self._left_out >= _MOST_LEFT_OUT:
                self._stop(f"has not been finite for {self._left_out} steps, up to")
        else:
            if sampled and ids.arrived is not None:
                job.intervals.observe(ids.arrived, batch.global_size)
            if logging or job.runtime.device.type == "cpu":  # on a GPU reading the loss drains the queue
                loss = float(job.dense.global_loss)
                if not math.isfinite(loss):
                    self._stop(f"is {loss} at")
            if logging and loss is not None:
                job.state.compare_copies(position.step)
                plain = batch.loss_weights_B is None and batch.labels_B.ndim == 1
                name = "logloss" if plain else "loss"  # weighted, or summed over labels
                speed = log.display.progress(position.step, loss, job.data.global_batch)
                log.metrics("train", {name: loss, "examples_per_second": speed})
        log.display.step(loss)

    def _stop(self, what: str) -> None:
        """Raises TrainError, on all ranks, that names the last step and the rank whose loss is not finite."""
        job, failed = self.job, self.job.position.step - 1
        bad = [rank for rank, fine in enumerate(job.runtime.all_gather(job.step.last_loss_finite)) if not fine]
        where = f"rank {bad[0]}" if bad else "no single rank (the sum overflowed)"
        # A checkpoint made just before the failed step has the weights that failed.
        raise TrainError(f"the loss {what} step {failed}, from {where}. {job.state.last_good(failed)}")

    def _begin(self) -> None:
        job = self.job
        job.notes += job.runtime.from_rank_0(self._forget_what_comes_again)
        if job.runtime.rank == 0:
            open_run(self.log.display, job)
        for note in job.notes:
            self.log.line(note)
        if job.resumed_from is None and job.config.checkpoint.initial:
            self.saver.save()  # so that there is always a good one to go back to
        if job.position.step and self.evaluations.due:  # a kill may have come between its checkpoint and evaluation
            self.evaluations.evaluate()
        else:
            self.evaluations.know_best_again()

    def _forget_what_comes_again(self) -> list[str]:
        """Removes records of steps to be trained again, and returns notes. On rank 0, as there may be fewer ranks
        now."""
        job = self.job
        forget_after(job.run_dir, -1 if job.resumed_from is None else job.position.step)
        (job.run_dir / RESULT).unlink(missing_ok=True)  # of an earlier start
        return job.checkpoints.set_aside_after(job.position.step)

    @contextmanager
    def _stopped_with_advice(self) -> Iterator[None]:
        """Adds to `Stopped` the step, and the checkpoint to continue from."""
        try:
            yield
        except Stopped as stopped:
            newest = self.job.checkpoints.newest()
            saved = f"--resume continues from {newest}." if newest else "There is no checkpoint of it."
            raise Stopped(stopped.number, f"after step {self.job.position.step}. {saved}") from None

    def write_report(self) -> None:
        """Writes the result and the report, on rank 0, after training; a signal now does not interrupt it."""
        with self.signals.postponed():
            self.log.finish(self.evaluations.best_on_test)


def lr_scale(step: int, config: ScheduleConfig) -> float:
    """Returns the factor on the configured learning rate at `step`, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay_steps == 0 or step < config.decay_start_step:
        return 1.0
    done = min((step - config.decay_start_step) / config.decay_steps, 1.0)
    return config.end_lr_ratio + (1.0 - config.end_lr_ratio) * (1.0 - done) ** config.decay_power
