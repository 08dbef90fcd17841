"""Predictions over a whole split, by all ranks, and their metrics, exactly: gathered, not averaged.

metrics = evaluate(model, embeddings, loader, runtime, autocast=False)     # a collective; {} but on rank 0
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.runtime import Runtime
from dlrm_autoshard.distributed.step import predict
from dlrm_autoshard.model.dlrm import DenseArch
from dlrm_autoshard.train.metrics import binary_metrics


def evaluate(
    model: DenseArch, embeddings: ShardedEmbeddings, batches: Iterable[Batch], runtime: Runtime, *, autocast: bool
) -> dict[str, float]:
    """batches: this rank's slices, as many on every rank."""
    predictions, labels = [], []
    for batch in batches:
        predictions.append(predict(model, embeddings, batch, autocast=autocast).cpu())
        labels.append(batch.labels_B[: batch.size])
    gathered = runtime.gather((torch.cat(predictions), torch.cat(labels)))
    if gathered is None:
        return {}
    return binary_metrics(torch.cat([p for p, _ in gathered]), torch.cat([y for _, y in gathered]))
