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
from dlrm_autoshard.training.metrics import metrics_of


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
