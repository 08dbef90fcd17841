"""The dense part of a step in the four passes between which vectors and gradients travel.

passes.bottom(batch)                       # while vectors travel
loss = passes.top(pooled)                  # this rank's share of the mean over the global batch
gradient = passes.backward_top()           # of `pooled`
passes.backward_bottom()                   # while gradients travel
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.model.dlrm import DenseArch


class DensePasses:
    """Gradients are added to the parameters' own. What a pass keeps for the next goes as soon as it is done with."""

    place: Tensor | None = None
    """Where the pooled vectors of the batch, whose bottom pass has been, are to be put; None: anywhere."""

    def __init__(self, model: DenseArch, *, autocast: bool) -> None:
        """autocast: products of bf16."""
        self.model, self._bf16 = model, autocast

    def bottom(self, batch: Batch) -> None:
        with self._autocast(batch):
            self._bottom = self.model.bottom(batch.real_rows(batch.dense_BF))
        self._batch = batch

    def top(self, pooled: Tensor) -> Tensor:
        """pooled: with the model's margin, and written to."""
        with self._autocast(self._batch):
            leaves = self._leaves = self._bottom.detach().requires_grad_(), pooled.detach().requires_grad_()
            self._loss = share_of_loss(self.model.top(leaves[0], self._batch.real_rows(leaves[1])), self._batch)
        return self._loss.detach()

    def backward_top(self) -> Tensor:
        self._loss.backward()
        bottom, pooled = self._leaves
        del self._loss, self._leaves  # the graph holds the vectors, the leaf their gradient
        self._bottom_gradient, gradient = bottom.grad, pooled.grad
        assert gradient is not None
        return gradient

    def backward_bottom(self) -> None:
        if self._bottom.requires_grad:  # one without parameters has nothing to learn
            self._bottom.backward(self._bottom_gradient)
        del self._bottom, self._bottom_gradient, self._batch

    def give_up(self) -> None:
        """No backward pass follows this batch's forward ones."""
        del self._bottom, self._batch, self._loss, self._leaves

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
