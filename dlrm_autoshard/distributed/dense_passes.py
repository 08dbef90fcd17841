"""The dense part of a step: the bottom while vectors travel, the top with them, and this rank's share of the loss.

bottom = passes.bottom(batch)
loss = passes.top(bottom, pooled, batch, {})     # summed over ranks it is the mean over the global batch
passes.backward(loss, dense)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.model.dlrm import DenseArch
from dlrm_autoshard.model.jagged import Sequences


class DensePasses:
    """A model's two halves, and autograd behind them."""

    place: Tensor | None = None
    """Where the pooled vectors of the batch, whose bottom pass has been, are to be put; None: anywhere."""

    def __init__(self, model: DenseArch, *, autocast: bool) -> None:
        """autocast: products of bf16."""
        self.model, self._bf16 = model, autocast

    def bottom(self, batch: Batch) -> Tensor:
        with self._autocast(batch):
            return self.model.bottom(batch.real_rows(batch.dense_BF))

    def top(self, bottom: Tensor, pooled: Tensor, batch: Batch, sequences: Sequences) -> Tensor:
        """pooled: with the model's margin, and written to."""
        with self._autocast(batch):
            return share_of_loss(self.model.logits(bottom, batch.real_rows(pooled), sequences), batch)

    def backward(self, loss: Tensor, dense: DataParallelDense) -> None:
        dense.backward(loss)

    def give_up(self) -> None:
        """No backward pass follows this batch's forward ones."""

    def _autocast(self, batch: Batch) -> torch.autocast:
        return torch.autocast(batch.dense_BF.device.type, torch.bfloat16, enabled=self._bf16)


def share_of_loss(logits_B: Tensor, batch: Batch) -> Tensor:
    """This rank's share of the global mean loss, of which a sample's is the weighted sum over its tasks: summed over
    ranks it is the mean over the global batch."""
    if logits_B.shape not in (batch.labels_B.shape, batch.real_rows(batch.labels_B).shape):
        raise UserError(
            f"the model gives logits of shape {list(logits_B.shape)} for labels of shape {list(batch.labels_B.shape)}: "
            "one is needed for each label. A data source with several names them, as `label_names`."
        )
    real = slice(0, batch.size)
    weights = None if batch.loss_weights_B is None else batch.loss_weights_B[real]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        logits_B[real].float(), batch.labels_B[real], weights, reduction="sum"
    )
    return loss / batch.global_size
