"""Training. `Trainer.run` and `_train_epoch` are its rhythm; job.py says what it works with, between_steps.py what else
it does, timetable.py what is when.

result = Trainer(config, runtime, run_dir).run()

Reading order: run_job.py -> `Trainer.run` -> `_train_epoch` -> distributed/step.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from dlrm_autoshard.autoshard.intervals import Ended
from dlrm_autoshard.distributed.step import NotFinite
from dlrm_autoshard.distributed.tracing import traced
from dlrm_autoshard.records.jsonl import forget_after
from dlrm_autoshard.records.run import RESULT
from dlrm_autoshard.training.between_steps import BetweenSteps
from dlrm_autoshard.training.lr_schedule import lr_scale
from dlrm_autoshard.training.opening import open_run
from dlrm_autoshard.training.stop_signals import Stopped


@dataclass(frozen=True)
class TrainResult:
    """metrics: of the last evaluation."""

    steps: int
    metrics: Mapping[str, float]


class Trainer(BetweenSteps):
    """A job that runs, and says what it does."""

    best_on_test: Mapping[str, float] | None = None

    # -- the rhythm --------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """All epochs that are left, an evaluation after each, the test split's at the end."""
        try:
            with self.display, self.timed("total"):
                self._begin()
                while not self.timetable.finished:
                    with self.signals.postponed():
                        self._train_epoch()
                        self.end_if_asked()
                        if self.timetable.evaluation_due:
                            self.evaluate(self.timetable.split_between_epochs)
                self.evaluate("test")
                self.written(self.checkpoints.finish)
                self.best_on_test = self.evaluate_best()
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
                samples = self._train_step(sampled=due.batch_is_whole and self.intervals.is_sampled(position.step))
                inside = not self.step.exhausted
                whole = not inside or (due.interval_due and parts_decided)
                place = (position.epoch, position.step)
                self.intervals.after_step(*place, samples, due.steps_left, whole=whole, tell=self._tell)
                if inside and due.checkpoint_due:
                    self.save()
                if inside and not due.out_of_steps and due.evaluation_due:
                    self.evaluate(due.split_between_epochs)
        stopped = not (self.step.exhausted or due.finished)
        if position.step > self.intervals.first_step and not stopped:
            self.intervals.end(position.epoch, position.step, due.steps_left, tell=self._tell)
        if self.step.exhausted:
            position.epoch, position.sample = position.epoch + 1, 0
        if stopped or due.checkpoint_due_after_epoch:
            self.save()

    # -- its beats ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        position = self.position
        self.notes += self.runtime.from_rank_0(self._forget_what_comes_again)
        if self.runtime.rank == 0:
            open_run(self.display, self, finished=self.timetable.finished)
        for note in self.notes:
            self.display.line(note)
        if self.resumed_from is None and self.config.checkpoint.initial:
            self.save()  # so that there is always a good one to name and to go back to
        if position.step and self.timetable.evaluation_due:  # after its checkpoint: a kill may have come between
            self.evaluate(self.timetable.split_between_epochs)
        else:
            self.know_best_again()

    def _forget_what_comes_again(self) -> list[str]:
        """On rank 0, for all ranks: there may be fewer now. Started again without a checkpoint, all comes again."""
        forget_after(self.run_dir, -1 if self.resumed_from is None else self.position.step)
        (self.run_dir / RESULT).unlink(missing_ok=True)  # of an earlier start: this one has not finished
        return self.set_later_aside()

    def set_later_aside(self) -> list[str]:
        """Checkpoints of steps that are to come. On rank 0; sentences to say of them."""
        return self.checkpoints.set_aside_after(self.position.step)

    def _train_step(self, *, sampled: bool) -> int:
        """Returns the number of this rank's samples."""
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
        if left_out:
            self.log_metrics("train", {"skipped_not_finite": 1.0})
            self.watch.left_out(position.step)
            self.display.step()
            return batch.size
        self.watch.updated()
        if sampled and ids is not None:
            self.intervals.observe(ids, batch.global_size)
        logging = position.step % config.train.log_every_steps == 0
        if not logging and self.runtime.device.type != "cpu":
            self.display.step()  # looking at the loss would make the GPU's queue run dry
            return batch.size
        loss = self.watch.check(position.step)
        if logging:
            self.watch.compare_replicas(position.step)
            plain = batch.loss_weights_B is None and batch.labels_B.ndim == 1
            name = "logloss" if plain else "loss"  # weighted, or summed over labels
            speed = self.display.progress(position.step, loss, self.global_batch)
            self.log_metrics("train", {name: loss, "examples_per_second": speed})
        self.display.step(loss)
        return batch.size

    def _tell(self, ended: Ended) -> None:
        """Says what was measured, and what was decided on it."""
        position, record, decision = self.position, ended.record, ended.decision
        if ended.moved:
            self.step.redistribute()
        self.spent("resharding", ended.seconds)
        if record is not None:
            self.journal.profile(record)
            self.log_metrics("train", {"throughput": record.throughput, "step_ms": record.step_ms})
            self.display.line(
                f"epoch {position.epoch}  step {position.step}  {record.throughput:,.0f} examples/s  "
                f"loss {float(self.dense.global_loss):.4f}"
            )
        if decision is not None:
            self.display.line(f"step {position.step}  {decision.text}")
        elif ended.noticed is not None:
            self.display.line(f"step {position.step}  {ended.noticed}")

    def write_report(self) -> None:
        """The result and the report, on rank 0, after training, which a signal that comes now does not take back."""
        seconds = self.seconds
        seconds["training"] = 2 * seconds["total"] - sum(seconds.values())
        seconds |= self.start_seconds
        with self.display, self.signals.postponed():
            for line in self.journal.finish(self.embeddings.plan, seconds, self.selection.best, self.best_on_test):
                self.display.line(line)
