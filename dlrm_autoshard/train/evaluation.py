"""Predictions over a whole split, by all ranks, and their metrics, exactly: gathered, not averaged.

metrics = evaluate(model, embeddings, loader, runtime, autocast=False)     # a collective; {} but on rank 0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.predict import predict
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.model.dlrm import DenseArch
from dlrm_autoshard.train.metrics import metrics_of


def evaluate(
    model: DenseArch,
    embeddings: ShardedEmbeddings,
    batches: Iterable[Batch],
    runtime: Runtime,
    *,
    autocast: bool,
    label_names: Sequence[str] = ("label",),
) -> dict[str, float]:
    """batches: this rank's slices, as many on every rank. Dropout is off, BatchNorm uses its running statistics."""
    logits, labels = [], []
    with evaluating(model):
        for batch in batches:
            logits.append(predict(model, embeddings, batch, autocast=autocast).cpu())
            labels.append(batch.labels_B[: batch.size])
    gathered = runtime.gather((torch.cat(logits), torch.cat(labels)))
    if gathered is None:
        return {}
    return metrics_of(torch.cat([p for p, _ in gathered]), torch.cat([y for _, y in gathered]), label_names)


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
