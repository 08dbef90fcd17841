"""The forward half of a step, for evaluations and predictions: no gradients, no clock, nothing in flight."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.model.dlrm import DenseArch


@torch.no_grad()
def predict(model: DenseArch, embeddings: ShardedEmbeddings, batch: Batch, *, autocast: bool) -> Tensor:
    """Logits of the batch's real samples: [size], or [size, L]. A collective: every rank calls it for every batch."""
    batch = embeddings.dense_on_device(batch)
    ids = embeddings.distribute(batch).finish()
    rows = embeddings.sequences.of(ids, batch.lengths_TB)
    local, apart = embeddings.lookup(ids, training=False), rows.look_up(embeddings.storage)
    pending = rows.send(apart, embeddings.send_pooled(rows.with_pooled(local, apart)))
    pooled = embeddings.in_output_order(pending.wait(), model.margin)
    if embeddings.means is not None:
        embeddings.means.divide_(pooled, batch.lengths_TB, model.margin)
    if embeddings.replicas is not None:
        embeddings.replicas.look_up(batch, training=False).put(pooled, model.margin[0])
    with torch.autocast(embeddings.device.type, torch.bfloat16, enabled=autocast):
        logits = model.logits(model.bottom(batch.dense_BF), pooled, rows.by_name(rows.values()))
    return logits[: batch.size].float()
