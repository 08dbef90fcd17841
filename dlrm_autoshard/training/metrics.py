"""How good the predictions are, exactly, over all ranks: auc, logloss, ne, calibration, accuracy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
