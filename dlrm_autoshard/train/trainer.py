"""Training. `Trainer.run` and `_train_epoch` are its rhythm; job.py says what it works with, timetable.py what is when.

result = Trainer(config, runtime, run_dir).run()

Reading order: run_job.py -> `Trainer.run` -> `_train_epoch` -> distributed/step.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from dlrm_autoshard.config import Config
from dlrm_autoshard.data.batch import Batch, Split, label_names_of
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.distributed.step import NotFinite
from dlrm_autoshard.distributed.tracing import traced
from dlrm_autoshard.records.jsonl import forget_after
from dlrm_autoshard.records.run import RESULT
from dlrm_autoshard.train.callbacks import Callback, Factory, find_callbacks
from dlrm_autoshard.train.checkpoints.folder import step_of
from dlrm_autoshard.train.checkpoints.manifest import CheckpointError
from dlrm_autoshard.train.display import Display, describe
from dlrm_autoshard.train.evaluation import evaluate
from dlrm_autoshard.train.job import Job
from dlrm_autoshard.train.journal import Journal
from dlrm_autoshard.train.loss_watch import LossWatch
from dlrm_autoshard.train.lr_schedule import lr_scale
from dlrm_autoshard.train.opening import open_run
from dlrm_autoshard.train.random_state import random_state, restore_random_state
from dlrm_autoshard.train.stop_signals import Stopped, StopSignals
from dlrm_autoshard.train.timetable import Timetable


@dataclass(frozen=True)
class TrainResult:
    """metrics: of the last evaluation."""

    steps: int
    metrics: Mapping[str, float]


class Trainer(Job):
    """A job that runs, and says what it does."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        run_dir: Path,
        signals: StopSignals | None = None,
        checkpoint: Path | None = None,
        *,
        fall_back: bool = True,
    ) -> None:
        """signals: those that end the job between two steps. checkpoint, fall_back: as a `Job` takes them."""
        factories: list[Factory] = []
        runtime.from_rank_0(lambda: factories.extend(find_callbacks(config.callbacks)))
        super().__init__(config, runtime, run_dir, checkpoint, fall_back=fall_back)
        self.signals = signals or StopSignals()
        callbacks: list[Callback] = []
        random = random_state(runtime.device)
        runtime.from_rank_0(lambda: callbacks.extend(make(run_dir, config) for make in factories))
        restore_random_state(random, runtime.device)  # whatever they drew: they are made anew at each start
        self.journal = Journal(run_dir, callbacks, active=runtime.rank == 0)
        self.seconds = dict.fromkeys(("total", "evaluation", "checkpoints", "resharding"), 0.0)  # of this start
        self.watch = LossWatch(runtime, self.step, self.state)
        self.display = Display(runtime.rank == 0, self.total_steps, self.position.step, config.run.log_level)
        self.metrics: Mapping[str, float] = {}
        self.selection = self.state.selection
        self.timetable = Timetable(self)

    # -- the rhythm --------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """All epochs that are left, an evaluation after each, the test split's at the end."""
        try:
            with self.display, self._timed("total"):
                self._begin()
                while not self.timetable.finished:
                    with self.signals.postponed():
                        self._train_epoch()
                        self._end_if_asked()
                        if self.timetable.evaluation_due:
                            self._evaluate(self.timetable.split_between_epochs)
                self._evaluate("test")
                self._written(self.checkpoints.finish)
        except Stopped as stopped:
            newest = self.checkpoints.newest()
            saved = f"--resume continues from {newest}." if newest else "There is no checkpoint of it."
            raise Stopped(stopped.number, f"after step {self.position.step}. {saved}") from None
        return TrainResult(self.position.step, self.metrics)

    def _train_epoch(self) -> None:
        """From the current position to the epoch's end, or to where the job ends before."""
        position, due = self.position, self.timetable
        # An epoch's parts end intervals where steps are named for them, or tables may move.
        parts_decided = self.config.autoshard.reshard.every_steps is not None or self.intervals.resharding is not None
        with self.batches("train", position.epoch, position.sample) as loader:
            self.step.begin_epoch(iter(loader))
            self.intervals.begin(position.step)
            while not (self.step.exhausted or due.finished or self.dense.stop_agreed):
                self._train_step(sampled=due.batch_is_whole and self.intervals.is_sampled(position.step))
                inside = not self.step.exhausted
                early = inside and self.intervals.is_due(position.step)
                if early or (inside and due.interval_due and parts_decided):
                    self._close_interval(early=early)
                if inside and due.checkpoint_due:
                    self._save()
                if inside and not due.out_of_steps and due.evaluation_due:
                    self._evaluate(due.split_between_epochs)
        stopped = not (self.step.exhausted or due.finished)
        if position.step > self.intervals.first_step and not stopped:
            self._close_interval()
        if self.step.exhausted:
            position.epoch, position.sample = position.epoch + 1, 0
        if stopped or due.checkpoint_due_after_epoch:
            self._save()

    # -- its beats ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        position = self.position
        self.notes += self.runtime.from_rank_0(self._forget_what_comes_again)
        if self.runtime.rank == 0:
            open_run(self.display, self, finished=self.timetable.finished)
        for note in self.notes:
            self.display.line(note)
        if self.resumed_from is None and self.config.checkpoint.initial:
            self._save()  # so that there is always a good one to name and to go back to
        if position.step and self.timetable.evaluation_due:
            self._evaluate(self.timetable.split_between_epochs)  # after its checkpoint: a kill may have come between
        elif self.selection.kept is not None and self._is_best(self.resumed_from):
            self.selection.kept.add(position.step, self._measured("val"))  # how good it is, later checkpoints know

    def _is_best(self, checkpoint: Path | None) -> bool:
        best: Path | None = self.runtime.broadcast(self.checkpoints.best())
        return checkpoint is not None and best is not None and best.name == checkpoint.name

    def _forget_what_comes_again(self) -> list[str]:
        """On rank 0, for all ranks: there may be fewer now. Started again without a checkpoint, all comes again."""
        forget_after(self.run_dir, -1 if self.resumed_from is None else self.position.step)
        (self.run_dir / RESULT).unlink(missing_ok=True)  # of an earlier start: this one has not finished
        return self.set_later_aside()

    def set_later_aside(self) -> list[str]:
        """Checkpoints of steps that are to come. On rank 0; sentences to say of them."""
        return self.checkpoints.set_aside_after(self.position.step)

    def _train_step(self, *, sampled: bool) -> None:
        config, position = self.config, self.position
        scale = lr_scale(position.step, config.schedule)
        tracing = position.step in config.profile.trace_steps
        trace = self.run_dir / "traces" / f"step_{position.step:08d}_rank_{self.runtime.rank:05d}.json"
        ids, left_out = self.step.ids, False
        self.dense.stop_asked = self.signals.received is not None
        if self.runtime.heartbeats is not None:
            self.runtime.heartbeats.step = position.step
        try:
            with traced(trace, self.clock) if tracing else nullcontext():
                batch = self.step.run(scale, config.tables.optimizer.lr * scale, sampled=sampled or tracing)
        except NotFinite as found:
            batch, left_out = found.batch, True
        if tracing and not left_out:
            self.clock.forget_last()  # the profiler's own time is in it
        position.sample += batch.global_size
        position.step += 1
        self.intervals.count(position.step, batch.size)
        if left_out:
            self._log_metrics("train", {"skipped_not_finite": 1.0})
            self.watch.left_out(position.step)
            return self.display.step()
        self.watch.updated()
        if sampled and ids is not None:
            self.intervals.observe(ids, batch.global_size)
        logging = position.step % config.train.log_every_steps == 0
        if not logging and self.runtime.device.type != "cpu":
            return self.display.step()  # looking at the loss would make the GPU's queue run dry
        loss = self.watch.check(position.step)
        if logging:
            self.watch.compare_replicas(position.step)
            plain = batch.loss_weights_B is None and batch.labels_B.ndim == 1
            self._log_metrics("train", {"logloss" if plain else "loss": loss})  # weighted, or summed over labels
            self.display.progress(position.step, loss, self.global_batch)
        self.display.step(loss)

    def _save(self) -> None:
        """Unless this step's is there: what was evaluated since is evaluated again by whoever goes on from it."""
        if self.config.checkpoint.enabled:
            with self._timed("checkpoints"):
                self._written(self.checkpoints.finish)
                newest = self.checkpoints.latest()
                if newest is None or step_of(newest) != self.position.step:
                    self.watch.compare_replicas(self.position.step)  # what is saved as good is good
                    self._written(lambda: self.state.save(self.position))

    def _save_this_step(self) -> None:
        """Returns when it is on disk."""
        self._save()
        with self._timed("checkpoints"):
            self._written(self.checkpoints.finish)

    def _written(self, write: Callable[[], None]) -> None:
        try:
            write()
        except CheckpointError as error:
            if self.config.checkpoint.on_error == "stop":
                raise
            self.display.line(f"step {self.position.step}  {error}")

    def _close_interval(self, *, early: bool = False) -> None:
        """Says what was measured, and what was decided on it. early: as `Intervals.close` takes it."""
        position, intervals = self.position, self.intervals
        with self._timed("resharding"):
            record, decision = intervals.close(position.epoch, position.step, self.timetable.steps_left, early=early)
            if decision is not None and decision.new_plan is not None:
                self.step.redistribute()
        if record is not None:
            self.journal.profile(record)
            self._log_metrics("train", {"throughput": record.throughput, "step_ms": record.step_ms})
            self.display.line(
                f"epoch {position.epoch}  step {position.step}  {record.throughput:,.0f} examples/s  "
                f"loss {float(self.dense.global_loss):.4f}"
            )
        if decision is not None:
            self.display.line(f"step {position.step}  {decision.text}")
        elif early:
            self.display.line(f"step {position.step}  {intervals.noticed}")
        intervals.open(position.step)

    def _evaluate(self, split: Split) -> None:
        """Metrics over all ranks' samples, and what follows from those of the val split."""
        if self.source.num_samples(split) == 0:
            return
        self.metrics = self._measured(split)
        self.timetable.evaluated()
        self._log_metrics(split, self.metrics, epoch=self._epochs_done)
        where = f"step {self.position.step}" if self.position.sample else f"epoch {self._epochs_done}"
        self.display.line(f"{where}  {split}  {describe(self.metrics)}")
        if split == "val":
            self._select()

    def _measured(self, split: Split) -> Mapping[str, float]:
        self.dense.broadcast_buffers()
        with self._timed("evaluation"), self.signals.postponed(), self.batches(split, self._epochs_done) as loader:
            batches = self._until_asked(loader)
            metrics = evaluate(
                self.step.model, self.embeddings, batches, self.runtime,
                autocast=self.autocast, label_names=label_names_of(self.source),
            )  # fmt: skip
        return self.runtime.broadcast(metrics)

    @property
    def _epochs_done(self) -> int:
        """The number of the epoch that training is in, or that has just ended."""
        return self.position.epoch - (self.position.sample == 0 and self.position.epoch > 0)

    def _select(self) -> None:
        """Keeps the checkpoint of the best evaluation, and says so where training ends early. A collective."""
        step, kept, watched = self.position.step, self.selection.kept, self.selection.watched
        best = kept is not None and kept.improves(step, self.metrics)
        if best:
            self._save_this_step()  # as before this evaluation: what goes on from here makes it again
        self.selection.add(step, self.metrics)
        if best:
            with self._timed("checkpoints"):
                self.runtime.from_rank_0(lambda: self.checkpoints.point_best_at(step))
        if watched is not None and self.selection.stop:
            self.display.line(
                f"step {step}  training ends early: {watched.worse} evaluations in a row were no better than "
                f"{watched.metric} {watched.value:.5f} of step {watched.step} (train.early_stopping)"
            )

    def _end_if_asked(self) -> None:
        """After a signal that any rank was sent. A collective."""
        received = [number for number in self.runtime.all_gather(self.signals.received) if number is not None]
        if received:
            self._save_this_step()
            raise Stopped(received[0])

    def _until_asked(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            if number % 16 == 0:
                self._end_if_asked()
            yield batch

    def write_report(self) -> None:
        """The result and the report, on rank 0, after training, which a signal that comes now does not take back."""
        result, seconds = self.placement.result, self.seconds
        seconds["training"] = 2 * seconds["total"] - sum(seconds.values())
        seconds["planning"] = 0.0 if result is None else result.seconds
        with self.display, self.signals.postponed():
            for line in self.journal.finish(self.embeddings.plan, seconds, self.selection.best):
                self.display.line(line)
            if (kept := self.selection.kept) is not None and kept.step not in (-1, self.position.step):
                self.display.line(
                    f"best on val: step {kept.step}, {kept.metric} {kept.value:.4f}; `dlrm-autoshard evaluate "
                    f"{self.run_dir} --checkpoint best`, likewise predict and export"
                )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """What is not training is left out of an interval's throughput."""
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started
        self.intervals.exclude(time.perf_counter() - started)

    def _log_metrics(self, split: str, metrics: Mapping[str, float], epoch: int | None = None) -> None:
        self.journal.metrics(self.position.step, self.position.epoch if epoch is None else epoch, split, metrics)
