"""Evaluates a whole split on all ranks, computes metrics, and keeps the best checkpoint.

evaluations = Evaluations(job, log, saver, signals)
evaluations.evaluate("val")             # to evaluations.metrics, metrics.jsonl and a line; keeps the best checkpoint

Metrics are exact: predictions are gathered, not metrics averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from dlrm_autoshard.data.batch import Batch, Split
from dlrm_autoshard.distributed.lookup.lookups import EmbeddingBags
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.distributed.step import predict
from dlrm_autoshard.model.dlrm import DenseArch
from dlrm_autoshard.training.checkpoints.folder import step_of
from dlrm_autoshard.training.checkpoints.manifest import CheckpointError
from dlrm_autoshard.training.display import describe
from dlrm_autoshard.training.job import Job
from dlrm_autoshard.training.run_log import RunLog
from dlrm_autoshard.training.saver import Saver
from dlrm_autoshard.training.stop_signals import StopSignals

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Evaluations:
    """A job's evaluations; methods are collectives. metrics, step: of the last evaluation. best_on_test: metrics of the
    best checkpoint, if it is not the last."""

    def __init__(self, job: Job, log: RunLog, saver: Saver, signals: StopSignals) -> None:
        self._job, self._log, self._saver, self._signals = job, log, saver, signals
        self.metrics: Mapping[str, float] = {}
        self.step = -1
        self.best_on_test: Mapping[str, float] | None = None

    @property
    def due(self) -> bool:
        """Whether to evaluate after this step: after an epoch, every `eval_every_steps`, and after the last step if it
        chooses a checkpoint."""
        job, every = self._job, self._job.config.train.eval_every_steps
        position = job.position
        due = position.sample == 0 or job.out_of_steps or (every is not None and position.step % every == 0)
        last = job.out_of_steps and not job.selection.wanted
        return due and self.step != position.step and not last

    def evaluate(self, split: Split | None = None) -> None:
        """Evaluates a split: by default val, or test if there is no val."""
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
        """Keeps the checkpoint of the best evaluation; says if training ends early."""
        selection, step = self._job.selection, self._job.position.step
        best = selection.kept is not None and selection.kept.improves(step, self.metrics)
        if best:
            self._saver.save_this_step()  # before the evaluation counts: a job resumed from here evaluates again
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
        """Evaluates again when a job resumes from the best checkpoint, which does not contain its own metric."""
        kept, resumed_from = self._job.selection.kept, self._job.resumed_from
        if kept is not None and resumed_from is not None:
            best = self._best()
            if best is not None and best.name == resumed_from.name:
                kept.add(self._job.position.step, self._measured("val"))

    def evaluate_best(self) -> None:
        """Evaluates the best checkpoint on the test split, if it is not the last and can be read. The model keeps its
        weights afterwards."""
        kept = self._job.selection.kept
        if kept is None or kept.step == self._job.position.step:
            return
        best = self._best()
        if best is None or step_of(best) != kept.step:
            return
        said = f"best on val: step {kept.step}, {kept.metric} {kept.value:.4f}"
        try:
            if self._job.data.source.num_samples("test"):
                self._job.state.load_weights(best)
                self.best_on_test = self._measured("test", to_the_end=True)
                said += f"; on test {describe(self.best_on_test)}"
        except CheckpointError as error:
            said += f"; it cannot be evaluated: {error}"
        self._log.line(said)

    def _best(self) -> Path | None:
        return self._job.runtime.broadcast(self._job.checkpoints.best())

    def _measured(self, split: Split, *, to_the_end: bool = False) -> Mapping[str, float]:
        """to_the_end: ignore requests to stop, as these weights must not be saved."""
        job = self._job
        job.dense.broadcast_buffers()
        with (
            self._log.timed("evaluation"),
            self._signals.postponed(),
            job.data.batches(split, job.position.epochs_done) as loader,
        ):
            batches = loader if to_the_end else self._until_asked(loader)
            with evaluating(job.step.model) as model:
                gathered = gathered_logits(model, job.bags, batches, job.runtime, autocast=job.autocast)
        metrics = {} if gathered is None else metrics_of(*gathered, job.data.label_names)
        return job.runtime.broadcast(metrics)

    def _until_asked(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            if number % 16 == 0:
                self._saver.end_if_asked()
            yield batch


def gathered_logits(
    model: DenseArch, bags: EmbeddingBags, batches: Iterable[Batch], runtime: Runtime, *, autocast: bool
) -> tuple[Tensor, Tensor] | None:
    """Gathers logits [S] and labels [S] ([S, L] for L tasks) of all samples in the data's order on rank 0. A
    collective.

    model: in evaluation mode. batches: this rank's slices, equally many on every rank."""
    logits, labels = [], []
    for batch in batches:
        logits.append(predict(model, bags, batch, autocast=autocast).cpu())
        labels.append(batch.labels_B[: batch.size])
    by_rank = runtime.gather((torch.cat(logits), torch.cat(labels), [len(of_batch) for of_batch in logits]))
    if by_rank is None:
        return None
    return _in_order((p, sizes) for p, _, sizes in by_rank), _in_order((y, sizes) for _, y, sizes in by_rank)


def _in_order(by_rank: Iterable[tuple[Tensor, list[int]]]) -> Tensor:
    """Merges ranks' samples into the data's order. by_rank: a rank's samples, and how many belong to each batch."""
    slices = [samples.split(sizes) for samples, sizes in by_rank]
    return torch.cat([of_rank for of_batch in zip(*slices, strict=True) for of_rank in of_batch])


@contextmanager
def evaluating(model: AnyModule) -> Iterator[AnyModule]:
    """Yields the model in evaluation mode; restores modules that were in training mode."""
    training = [module for module in model.modules() if module.training]
    try:
        yield model.eval()
    finally:
        for module in training:
            module.training = True


def metrics_of(logits: Tensor, labels: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Returns metrics. logits, labels: [N], or [N, L] of the named tasks: `auc.click` is of one task, `auc` the mean
    over tasks that have it. There are no means if any logit is not finite."""
    if labels.ndim == 1:
        return binary_metrics(logits, labels)
    by_task = {name: binary_metrics(logits[:, task], labels[:, task]) for task, name in enumerate(names)}
    found = list(by_task.values())
    means: dict[str, float]
    if bad := sum(metrics.get("not_finite", 0.0) for metrics in found):
        means = {"not_finite": bad}  # the other tasks' mean would look like a better model
    else:
        means = {
            metric: sum(metrics[metric] for metrics in found if metric in metrics) / sum(metric in m for m in found)
            for metric in dict.fromkeys(metric for metrics in found for metric in metrics)
        }
    return means | {f"{metric}.{name}": value for name, metrics in by_task.items() for metric, value in metrics.items()}


def binary_metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Returns metrics of logits [N] and labels [N] of 0 or 1, over all ranks.

    ne: logloss / entropy of the mean label (He et al. 2014, section 3); calibration: mean prediction / mean label.
    Undefined metrics are left out if there is only one class; if logits are not finite, only `not_finite`, their
    number, is returned: AUC would rank them like any others.
    """
    if len(labels) == 0:
        return {}
    if bad := int((~torch.isfinite(logits)).sum()):
        return {"not_finite": float(bad)}
    # Imported here because it loads torchvision and transformers, if installed: six of fifteen seconds on one machine,
    # which only an evaluating rank should spend.
    from torchmetrics.functional.classification import binary_accuracy, binary_auroc

    logits, labels = logits.double(), labels.double()
    predictions = torch.sigmoid(logits)
    # Ranked by logits, because sigmoid is exactly 1 from 37 on, which would make ties.
    order, rank_N = logits.unique(return_inverse=True)
    # From logits, because log(1 - sigmoid) would be cut off at 100.
    logloss = float(torch.nn.functional.binary_cross_entropy_with_logits(logits, labels))
    result = {"logloss": logloss, "accuracy": float(binary_accuracy(predictions, labels.long()))}
    base = labels.mean()
    if 0 < base < 1:
        entropy = float(torch.nn.functional.binary_cross_entropy(base.expand_as(labels), labels))
        result["auc"] = float(binary_auroc(rank_N.double() / len(order), labels.long()))
        result["ne"] = logloss / entropy
    if base > 0:
        result["calibration"] = float(predictions.mean() / base)
    return result
