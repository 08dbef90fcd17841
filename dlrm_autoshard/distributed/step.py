"""One training step, as in any PyTorch loop, and prediction.

With `overlap` exchanges start early and are waited for late: vectors travel while the bottom MLP runs, gradients during
its backward, the dense all-reduce behind the fused table update, the next batch's ids behind all of it. Results are
bit-equal without it. Sampled steps wait right after each start, so that stages do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.lookup.lookups import EmbeddingBags, SentIds
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.model.dlrm import DenseArch
from dlrm_autoshard.model.jagged import Sequences


class NotFinite(Exception):
    """The loss is NaN or infinite; nothing was updated by its batch."""


class DensePasses:
    """A model's two halves with autograd: the bottom runs while vectors travel, the top after they arrive."""

    place: Tensor | None = None
    """Where to put the pooled vectors of the batch whose bottom has run; None: anywhere."""

    def __init__(self, model: DenseArch, *, autocast: bool = False) -> None:
        """autocast: bf16 matrix products."""
        self.model, self._bf16 = model, autocast

    def bottom(self, batch: Batch) -> Tensor:
        with self._autocast(batch):
            return self.model.bottom(batch.real_rows(batch.dense_BF))

    def top(self, bottom: Tensor, pooled: Tensor, batch: Batch, sequences: Sequences) -> Tensor:
        """Returns this rank's share of the loss. pooled: with the model's margin; is written to."""
        with self._autocast(batch):
            return share_of_loss(self.model.logits(bottom, batch.real_rows(pooled), sequences), batch)

    def backward(self, loss: Tensor, dense: DataParallelDense) -> None:
        dense.backward(loss)

    def give_up(self) -> None:
        """Frees a batch whose backward passes will not run."""

    def _autocast(self, batch: Batch) -> torch.autocast:
        return torch.autocast(batch.dense_BF.device.type, torch.bfloat16, enabled=self._bf16)


class TrainStep:
    """Trains a model batch by batch: `for _, ids in bags.ahead(batches, lambda batch: batch)`."""

    def __init__(
        self,
        model: DenseArch,
        dense: DataParallelDense,
        bags: EmbeddingBags,
        *,
        passes: DensePasses | None = None,
        all_finite: Callable[[Tensor], bool] | None = None,
    ) -> None:
        """dense: must sum losses, as `bags` does. passes: over the model; default full precision. all_finite: called
        with each local loss before any update; all ranks must agree. None: no check."""
        self.model, self.dense, self.bags, self._all_finite = model, dense, bags, all_finite
        dense.clock, dense.overlap = bags.clock, bags.overlap
        self.passes = passes or DensePasses(model)

    @property
    def last_loss_finite(self) -> bool:
        """Whether this rank's share of the last loss is finite."""
        return bool(torch.isfinite(self._loss))

    def run(self, ids: SentIds, lr_scale: float, table_lr: float, *, sampled: bool = False) -> None:
        """Trains on the batch of these ids. Raises NotFinite, on all ranks, if the loss is not."""
        bags, dense, passes, batch = self.bags, self.dense, self.passes, ids.batch
        with bags.clock.step(sampled=sampled):
            bags.table_lr = table_lr
            kept = None if self._all_finite is None else dense.kept_buffers()
            lookup = bags.look_up(ids)  # vectors travel while the bottom runs
            bottom = passes.bottom(batch)
            loss = passes.top(bottom, lookup.wait(self.model.margin, passes.place), batch, lookup.sequences)
            self._loss = loss.detach()
            bags.clock.end()
            if self._all_finite is not None and kept is not None and not self._all_finite(self._loss):
                passes.give_up()
                dense.restore_buffers(kept)  # such as BatchNorm's, which have seen the batch
                lookup.cancel()
                raise NotFinite
            passes.backward(loss, dense)  # also updates the tables
            dense.step(lr_scale)


@torch.no_grad()
def predict(model: DenseArch, bags: EmbeddingBags, batch: Batch, *, autocast: bool) -> Tensor:
    """Returns logits of the batch's real samples: [size], or [size, L]. A collective: all ranks call it for every
    batch."""
    lookup = bags.look_up(batch)
    with torch.autocast(bags.device.type, torch.bfloat16, enabled=autocast):
        bottom = model.bottom(lookup.batch.dense_BF)
        logits = model.logits(bottom, lookup.wait(model.margin), lookup.sequences)
    return logits[: batch.size].float()


def share_of_loss(logits_B: Tensor, batch: Batch) -> Tensor:
    """Returns this rank's share of the global mean loss (a sample's loss is the weighted sum over tasks); the ranks'
    sum is the mean over the global batch."""
    if logits_B.shape not in (batch.labels_B.shape, batch.real_rows(batch.labels_B).shape):
        raise UserError(
            f"the model returns logits of shape {list(logits_B.shape)} for labels of shape "
            f"{list(batch.labels_B.shape)}: each label needs one. A source names several labels in `label_names`."
        )
    real = slice(0, batch.size)
    weights = None if batch.loss_weights_B is None else batch.loss_weights_B[real]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        logits_B[real].float(), batch.labels_B[real], weights, reduction="sum"
    )
    return loss / batch.global_size
