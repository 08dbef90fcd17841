"""Predictions over a whole split, by all ranks, and their metrics, exactly: gathered, not averaged.

metrics = evaluate(model, bags, loader, runtime, autocast=False)     # a collective; {} but on rank 0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.lookups import EmbeddingBags
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.distributed.step import predict
from dlrm_autoshard.model.dlrm import DenseArch


def evaluate(
    model: DenseArch,
    bags: EmbeddingBags,
    batches: Iterable[Batch],
    runtime: Runtime,
    *,
    autocast: bool,
    label_names: Sequence[str] = ("label",),
) -> dict[str, float]:
    """batches: this rank's slices, as many on every rank. Dropout is off, BatchNorm uses its running statistics."""
    with evaluating(model):
        found = gathered_logits(model, bags, batches, runtime, autocast=autocast)
    return {} if found is None else metrics_of(*found, label_names)


def gathered_logits(
    model: DenseArch, bags: EmbeddingBags, batches: Iterable[Batch], runtime: Runtime, *, autocast: bool
) -> tuple[Tensor, Tensor] | None:
    """Gathers logits [S] and labels [S] (of several tasks [S, L]) of all samples, in the data's order, on rank 0, from
    a model in evaluation mode. A collective. batches: as `evaluate` takes them."""
    logits, labels = [], []
    for batch in batches:
        logits.append(predict(model, bags, batch, autocast=autocast).cpu())
        labels.append(batch.labels_B[: batch.size])
    by_rank = runtime.gather((torch.cat(logits), torch.cat(labels), [len(of_batch) for of_batch in logits]))
    if by_rank is None:
        return None
    return _in_order((p, sizes) for p, _, sizes in by_rank), _in_order((y, sizes) for _, y, sizes in by_rank)


def _in_order(by_rank: Iterable[tuple[Tensor, list[int]]]) -> Tensor:
    """Each rank's samples, and how many of them are of each batch, of which ranks have slices one after the other."""
    slices = [samples.split(sizes) for samples, sizes in by_rank]
    return torch.cat([of_rank for of_batch in zip(*slices, strict=True) for of_rank in of_batch])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode in here; afterwards what was in training mode is again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def metrics_of(logits: Tensor, labels: Tensor, names: Sequence[str]) -> dict[str, float]:
    """logits, labels: [N], or [N, L] of L tasks of these names: `auc.click` is one's, `auc` the mean of all that have
    it. Where one task's logits are not finite, there are no means."""
    if labels.ndim == 1:
        return binary_metrics(logits, labels)
    by_task = {name: binary_metrics(logits[:, task], labels[:, task]) for task, name in enumerate(names)}
    found = list(by_task.values())
    means: dict[str, float]
    if bad := sum(metrics.get("not_finite", 0.0) for metrics in found):
        means = {"not_finite": bad}  # as of one task: the others' mean would pass for a better model's
    else:
        means = {
            metric: sum(metrics[metric] for metrics in found if metric in metrics) / sum(metric in m for m in found)
            for metric in dict.fromkeys(metric for metrics in found for metric in metrics)
        }
    return means | {f"{metric}.{name}": value for name, metrics in by_task.items() for metric, value in metrics.items()}


def binary_metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """logits: [N]; labels: 0 or 1 [N], of all ranks.

    ne: logloss over the entropy of the mean label (He et al. 2014, section 3); calibration: mean prediction over mean
    label. Where only one class occurs, what is not defined is left out; where logits are not finite, nothing is but
    their number, `not_finite`: AUC would rank them like any others.
    """
    if len(labels) == 0:
        return {}
    if bad := int((~torch.isfinite(logits)).sum()):
        return {"not_finite": float(bad)}
    # Where torchvision and transformers are installed it loads them too: six seconds (of fifteen on one GPU machine)
    # that no job's start needs, and no rank but the one that is here.
    from torchmetrics.functional.classification import binary_accuracy, binary_auroc

    logits, labels = logits.double(), labels.double()
    predictions = torch.sigmoid(logits)
    # Ranked by logits: sigmoid is exactly 1 from 37 on, and would tie what the model tells apart.
    order, rank_N = logits.unique(return_inverse=True)
    # From logits: a sure and wrong prediction costs what it costs, where log(1 - sigmoid) would be cut off at 100.
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
