"""A job's evaluations, and what follows from them: the best checkpoint, an early end.

evaluations = Evaluations(job, log, saver, signals)
evaluations.evaluate("val")             # in evaluations.metrics, metrics.jsonl and a line
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dlrm_autoshard.data.batch import Batch, Split
from dlrm_autoshard.training.checkpoints.folder import step_of
from dlrm_autoshard.training.checkpoints.manifest import CheckpointError
from dlrm_autoshard.training.display import describe
from dlrm_autoshard.training.evaluation import evaluate
from dlrm_autoshard.training.job import Job
from dlrm_autoshard.training.run_log import RunLog
from dlrm_autoshard.training.saver import Saver
from dlrm_autoshard.training.stop_signals import StopSignals


class Evaluations:
    """Methods are collectives. metrics: the last evaluation's; step: the one after which it was."""

    def __init__(self, job: Job, log: RunLog, saver: Saver, signals: StopSignals) -> None:
        self._job, self._log, self._saver, self._signals = job, log, saver, signals
        self.metrics: Mapping[str, float] = {}
        self.step = -1

    @property
    def due(self) -> bool:
        """Whether to evaluate after this step: after an epoch and every so many steps; after the last one where
        something is chosen by it."""
        job, every = self._job, self._job.config.train.eval_every_steps
        position = job.position
        due = position.sample == 0 or job.out_of_steps or (every is not None and position.step % every == 0)
        last = job.out_of_steps and not job.selection.wanted
        return due and self.step != position.step and not last

    def evaluate(self, split: Split | None = None) -> None:
        """split: val if not said, or test where there is no val."""
        position, source = self._job.position, self._job.data.source
        split = split or ("val" if source.num_samples("val") else "test")
        if source.num_samples(split) == 0:
            return
        self.metrics = self._measured(split)
        self.step = position.step
        self._log.metrics(split, self.metrics)
        where = f"step {position.step}" if position.sample else f"epoch {position.epochs_done}"
        self._log.line(f"{where}  {split}  {describe(self.metrics)}")
        if split == "val":
            self.select()

    def select(self) -> None:
        """Keeps the checkpoint of the best evaluation, and says so where training ends early."""
        selection, step = self._job.selection, self._job.position.step
        best = selection.kept is not None and selection.kept.improves(step, self.metrics)
        if best:
            self._saver.save_this_step()  # as before this evaluation: what goes on from here makes it again
        selection.add(step, self.metrics)
        if best:
            self._saver.point_best_at(step)
        watched = selection.watched
        if watched is not None and selection.stop:
            self._log.line(
                f"step {step}  training ends early: {watched.worse} evaluations in a row were no better than "
                f"{watched.metric} {watched.value:.5f} of step {watched.step} (train.early_stopping)"
            )

    def know_best_again(self) -> None:
        """Where the job goes on from the checkpoint that is the best: how good it is, later checkpoints know."""
        kept, resumed_from = self._job.selection.kept, self._job.resumed_from
        if kept is not None and resumed_from is not None:
            best = self._best()
            if best is not None and best.name == resumed_from.name:
                kept.add(self._job.position.step, self._measured("val"))

    def evaluate_best(self) -> Mapping[str, float] | None:
        """The best checkpoint's metrics, where that is not the last one; its weights are the model's from here on. None
        where there is no such, no test split, or one that cannot be read."""
        kept = self._job.selection.kept
        if kept is None or kept.step == self._job.position.step:
            return None
        best = self._best()
        if best is None or step_of(best) != kept.step:
            return None
        said = f"best on val: step {kept.step}, {kept.metric} {kept.value:.4f}"
        metrics: Mapping[str, float] | None = None
        try:
            if self._job.data.source.num_samples("test"):
                self._job.state.load_weights(best)
                metrics = self._measured("test", to_the_end=True)
                said += f"; on test {describe(metrics)}"
        except CheckpointError as error:
            said += f"; it cannot be evaluated: {error}"
        self._log.line(said)
        return metrics

    def _best(self) -> Path | None:
        best: Path | None = self._job.runtime.broadcast(self._job.checkpoints.best())
        return best

    def _measured(self, split: Split, *, to_the_end: bool = False) -> Mapping[str, float]:
        """to_the_end: whoever asks the job to stop; its weights are not those to save then."""
        job = self._job
        job.dense.broadcast_buffers()
        with (
            self._log.timed("evaluation"),
            self._signals.postponed(),
            job.data.batches(split, job.position.epochs_done) as loader,
        ):
            batches = loader if to_the_end else self._until_asked(loader)
            metrics = evaluate(
                job.step.model, job.bags, batches, job.runtime,
                autocast=job.autocast, label_names=job.data.label_names,
            )  # fmt: skip
        found: Mapping[str, float] = job.runtime.broadcast(metrics)
        return found

    def _until_asked(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            if number % 16 == 0:
                self._saver.end_if_asked()
            yield batch
