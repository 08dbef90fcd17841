"""What a job does between its steps: evaluates, keeps checkpoints and the best of them, ends where it was asked to.

job = BetweenSteps(config, runtime, run_dir)
job.evaluate("val")                     # and what follows from that: the best checkpoint, an early end
job.save()                              # unless this step's checkpoint is there
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dlrm_autoshard.config import Config
from dlrm_autoshard.data.batch import Batch, Split, label_names_of
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.records.folder import REPLACED, RunFolder
from dlrm_autoshard.records.jsonl import lost_if_unwritable
from dlrm_autoshard.training.callbacks import Callback, Factory, find_callbacks
from dlrm_autoshard.training.checkpoints.folder import step_of
from dlrm_autoshard.training.checkpoints.manifest import CheckpointError
from dlrm_autoshard.training.display import LOG, Display, describe
from dlrm_autoshard.training.evaluation import evaluate
from dlrm_autoshard.training.job import Job
from dlrm_autoshard.training.journal import Journal
from dlrm_autoshard.training.loss_watch import LossWatch
from dlrm_autoshard.training.random_state import random_state, restore_random_state
from dlrm_autoshard.training.stop_signals import Stopped, StopSignals
from dlrm_autoshard.training.timetable import Timetable


class BetweenSteps(Job):
    """Public methods are collectives, but for `written` and those of the last section."""

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
        resumed_at = None if self.resumed_from is None else self.position.step
        self.journal = Journal(run_dir, callbacks, active=runtime.rank == 0, resumed_at=resumed_at)
        self.seconds = dict.fromkeys(("total", "evaluation", "checkpoints", "resharding"), 0.0)  # of this start
        self.watch = LossWatch(runtime, self.step, self.state)
        self.display = Display(runtime.rank == 0, self.total_steps, self.position.step, config.run.log_level)
        self.metrics: Mapping[str, float] = {}
        self.selection = self.state.selection
        self.write_start: Callable[[], None] = lambda: None  # on rank 0: what a run's directory needs to be continued
        self._run_folder = RunFolder(run_dir)
        self.timetable = Timetable(self)

    # -- evaluations -------------------------------------------------------------------------------------------------

    def evaluate(self, split: Split) -> None:
        position = self.position
        if self.source.num_samples(split) == 0:
            return
        self.metrics = self._measured(split)
        self.timetable.evaluated()
        self.log_metrics(split, self.metrics, epoch=self._epochs_done)
        where = f"step {position.step}" if position.sample else f"epoch {self._epochs_done}"
        self.display.line(f"{where}  {split}  {describe(self.metrics)}")
        if split == "val":
            self.select()

    def select(self) -> None:
        """Keeps the checkpoint of the best evaluation, and says so where training ends early."""
        selection, step = self.selection, self.position.step
        best = selection.kept is not None and selection.kept.improves(step, self.metrics)
        if best:
            self.save_this_step()  # as before this evaluation: what goes on from here makes it again
        selection.add(step, self.metrics)
        if best:
            with self.timed("checkpoints"):
                self.runtime.from_rank_0(partial(self._point_best_at, step))
        watched = selection.watched
        if watched is not None and selection.stop:
            self.display.line(
                f"step {step}  training ends early: {watched.worse} evaluations in a row were no better than "
                f"{watched.metric} {watched.value:.5f} of step {watched.step} (train.early_stopping)"
            )

    def _point_best_at(self, step: int) -> None:
        try:
            self.checkpoints.point_best_at(step)
        except OSError as error:
            if self.config.checkpoint.on_error == "stop":
                raise
            LOG.warning("step %d  checkpoints/best cannot be written: %s", step, error.strerror)

    def know_best_again(self) -> None:
        """Where the job goes on from the checkpoint that is the best: how good it is, later checkpoints know."""
        kept = self.selection.kept
        if kept is not None and self.resumed_from is not None:
            best = self._best()
            if best is not None and best.name == self.resumed_from.name:
                kept.add(self.position.step, self._measured("val"))

    def evaluate_best(self) -> Mapping[str, float] | None:
        """The best checkpoint's metrics, where that is not the last one; its weights are the model's from here on. None
        where there is no such, no test split, or one that cannot be read."""
        kept = self.selection.kept
        if kept is None or kept.step == self.position.step:
            return None
        best = self._best()
        if best is None or step_of(best) != kept.step:
            return None
        said = f"best on val: step {kept.step}, {kept.metric} {kept.value:.4f}"
        metrics: Mapping[str, float] | None = None
        try:
            if self.source.num_samples("test"):
                self.state.load_weights(best)
                metrics = self._measured("test", to_the_end=True)
                said += f"; on test {describe(metrics)}"
        except CheckpointError as error:
            said += f"; it cannot be evaluated: {error}"
        self.display.line(said)
        return metrics

    def _best(self) -> Path | None:
        best: Path | None = self.runtime.broadcast(self.checkpoints.best())
        return best

    def _measured(self, split: Split, *, to_the_end: bool = False) -> Mapping[str, float]:
        """to_the_end: whoever asks the job to stop; its weights are not those to save then."""
        self.dense.broadcast_buffers()
        with (
            self.timed("evaluation"),
            self.signals.postponed(),
            self.batches(split, self._epochs_done) as loader,
        ):
            batches = loader if to_the_end else self._until_asked(loader)
            metrics = evaluate(
                self.step.model, self.embeddings, batches, self.runtime,
                autocast=self.autocast, label_names=label_names_of(self.source),
            )  # fmt: skip
        found: Mapping[str, float] = self.runtime.broadcast(metrics)
        return found

    def _until_asked(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            if number % 16 == 0:
                self.end_if_asked()
            yield batch

    @property
    def _epochs_done(self) -> int:
        """The number of the epoch that training is in, or that has just ended."""
        position = self.position
        return position.epoch - (position.sample == 0 and position.epoch > 0)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Unless this step's is there: what was evaluated since is evaluated again by whoever goes on from it."""
        if self.config.checkpoint.enabled:
            self.keep_folder()
            with self.timed("checkpoints"):
                self.written(self.checkpoints.finish)
                newest = self.checkpoints.latest()
                if newest is None or step_of(newest) != self.position.step:
                    self.watch.compare_replicas(self.position.step)  # what is saved as good is good
                    self.written(lambda: self.state.save(self.position))

    def save_this_step(self) -> None:
        """Returns when it is on disk."""
        self.save()
        with self.timed("checkpoints"):
            self.written(self.checkpoints.finish)

    def written(self, write: Callable[[], None]) -> None:
        try:
            write()
        except CheckpointError as error:
            if self.config.checkpoint.on_error == "stop":
                raise
            self.display.line(f"step {self.position.step}  {error}")

    def end_if_asked(self) -> None:
        """After a signal that any rank was sent. A collective."""
        received = [number for number in self.runtime.all_gather(self.signals.received) if number is not None]
        if received:
            self.save_this_step()
            raise Stopped(received[0])

    # -- time and figures --------------------------------------------------------------------------------------------

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """What is not training is left out of an interval's throughput, and of the speed that is shown."""
        started = time.perf_counter()
        yield
        self.spent(phase, time.perf_counter() - started)

    def spent(self, phase: str, seconds: float) -> None:
        self.seconds[phase] += seconds
        self.intervals.exclude(seconds)
        self.display.exclude(seconds)

    def keep_folder(self) -> None:
        """Says, on rank 0, where the run's directory was renamed or removed, and makes it again."""
        if self.runtime.rank == 0 and self._run_folder.was_replaced():
            LOG.warning(REPLACED, self.run_dir)
            with lost_if_unwritable(self.run_dir):
                self.run_dir.mkdir(parents=True, exist_ok=True)
                self.write_start()

    def log_metrics(self, split: str, metrics: Mapping[str, float], epoch: int | None = None) -> None:
        self.keep_folder()
        self.journal.metrics(self.position.step, self.position.epoch if epoch is None else epoch, split, metrics)
