"""One training step, in the order in which things happen.

With `overlap`, whatever travels is started early and waited for late: the bottom MLP runs while vectors travel, its
backward while gradients travel, the dense all-reduce behind the fused table update, a following batch's ids behind
all of it. Results are bit-equal without: what travels does not depend on what is computed meanwhile.
Sampled steps wait at once after each start (`_settle`), so that each stage's time is its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.lookup.device_ids import DeviceIdDistribution
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.exchange import Pending
from dlrm_autoshard.distributed.lookup.id_distribution import IdDistribution, LocalIds
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.model.dlrm import DenseArch


class NotFinite(Exception):
    """A loss that is NaN or infinite, found before anything was updated by this batch."""

    def __init__(self, batch: Batch) -> None:
        super().__init__("the loss is not finite")
        self.batch = batch


class TrainStep:
    """Runs steps over an epoch's batches; the ids of the next `embeddings.batches_ahead` are with their owners."""

    def __init__(
        self,
        model: DenseArch,
        dense: DataParallelDense,
        embeddings: ShardedEmbeddings,
        clock: StageClock,
        *,
        overlap: bool,
        autocast: bool,
        all_finite: Callable[[Tensor], bool] | None = None,
    ) -> None:
        """all_finite: asked with each local loss, before any update; all ranks must agree. None: not asked."""
        self.model, self.dense, self.embeddings, self.clock = model, dense, embeddings, clock
        self._overlap, self._bf16, self._all_finite = overlap, autocast, all_finite
        self._device = embeddings.device

        self._waiting: deque[tuple[Batch, LocalIds]] = deque()

    def begin_epoch(self, batches: Iterator[Batch]) -> bool:
        """Fetches the first batches and their ids. False where there is none."""
        self._batches = batches
        self._waiting.clear()
        while len(self._waiting) < self.embeddings.batches_ahead and (batch := self._fetch()) is not None:
            self._waiting.append((batch, self.embeddings.distribute(batch).finish()))
        return not self.exhausted

    def redistribute(self) -> None:
        """Sends the waiting batches' ids again: after tables have moved, they have other owners."""
        self._waiting = deque((batch, self.embeddings.distribute(batch).finish()) for batch, _ in self._waiting)

    @property
    def ids(self) -> LocalIds | None:
        """Of the batch that the next `run` trains on."""
        return None if self.exhausted else self._waiting[0][1]

    @property
    def exhausted(self) -> bool:
        return not self._waiting

    @property
    def last_loss_finite(self) -> bool:
        """Of this rank's share of the last step's loss."""
        return bool(torch.isfinite(self._loss))

    def run(self, lr_scale: float, table_lr: float, *, sampled: bool = False) -> Batch:
        """One step on the batch that has waited longest; afterwards another waits. Returns the batch trained on."""
        clock, dense, embeddings, model = self.clock, self.dense, self.embeddings, self.model
        batch, ids = self._waiting[0]
        with clock.step(sampled=sampled):
            embeddings.set_learning_rate(table_lr)
            dense.zero_gradient()
            kept = None if self._all_finite is None else dense.kept_buffers()

            with clock.stage("fwd_compute"):
                local = embeddings.lookup(ids)
                if self._overlaps and len(self._waiting) > 1:
                    embeddings.prefetch(self._waiting[1][1])
            clock.barrier("fwd_comms")
            with clock.stage("fwd_comms"):
                vectors = self._settle(embeddings.send_pooled(local))
                lookup = get_gradient_edge(local)  # all that the update needs
                del local  # what is done with goes at once: the next buffers take its place
            with clock.stage("data_wait"):
                following = self._fetch()
            with clock.stage("input_dist"):
                following_ids = self._send_lengths(following)
            with clock.stage("dense_fwd"), self._autocast():
                bottom = model.bottom(batch.dense_BF)
            with clock.stage("fwd_comms"):
                pooled = embeddings.in_output_order(vectors.wait(), model.margin).detach().requires_grad_()
                del vectors
            with clock.stage("dense_fwd"), self._autocast():
                bottom_leaf = bottom.detach().requires_grad_()
                loss = share_of_loss(model.top(bottom_leaf, pooled), batch)
                self._loss = loss.detach()
            if self._all_finite is not None and kept is not None and not self._all_finite(loss):
                dense.restore_buffers(kept)  # of BatchNorm, say, which has seen the batch
                embeddings.take_back_lookup()
                self._advance(following, following_ids)
                raise NotFinite(batch)

            with clock.stage("dense_bwd"):
                loss.backward()
                del loss  # its graph holds the vectors and their gradient
            clock.barrier("bwd_comms")
            with clock.stage("bwd_comms"):
                gradients = self._settle(embeddings.send_gradients(_taken_gradient(pooled), model.margin))
                del pooled
            with clock.stage("dense_bwd"):
                if bottom.requires_grad:  # one without parameters has nothing to learn
                    bottom.backward(bottom_leaf.grad)
            reduced = None
            if self._overlaps:
                if following_ids is not None:
                    following_ids.send_values()
                reduced = dense.start_all_reduce(self._loss)
            with clock.stage("bwd_comms"):
                arrived = gradients.wait()
                del gradients
            with clock.stage("bwd_compute"):
                embeddings.update(lookup, arrived)
                del arrived
            clock.barrier("grad_allreduce")
            with clock.stage("grad_allreduce"):
                (reduced or dense.start_all_reduce(self._loss)).wait()
            with clock.stage("dense_optim"):
                dense.step(lr_scale)
            self._advance(following, following_ids)
        return batch

    @property
    def _overlaps(self) -> bool:
        return self._overlap and not self.clock.sampled

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16)

    def _settle(self, pending: Pending) -> Pending:
        if not self._overlaps:
            pending.wait()
        return pending

    def _fetch(self) -> Batch | None:
        batch = next(self._batches, None)
        return None if batch is None else self.embeddings.dense_on_device(batch)

    def _send_lengths(self, batch: Batch | None) -> IdDistribution | DeviceIdDistribution | None:
        return self.embeddings.distribute(batch) if batch is not None and self._overlaps else None

    def _advance(self, following: Batch | None, ids: IdDistribution | DeviceIdDistribution | None) -> None:
        """The batch of this step goes, and the following one's ids come home."""
        self._waiting.popleft()
        if following is not None and ids is None:
            self.clock.barrier("input_dist")
        with self.clock.stage("input_dist"):
            if following is not None and ids is None:
                ids = self.embeddings.distribute(following)
            if following is not None and ids is not None:
                self._waiting.append((following, ids.finish()))


def _taken_gradient(leaf: Tensor) -> Tensor:
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    return gradient


def share_of_loss(logits_B: Tensor, batch: Batch) -> Tensor:
    """This rank's share of the global mean loss, of which a sample's is the weighted sum over its tasks: summed over
    ranks it is the mean over the global batch."""
    if logits_B.shape != batch.labels_B.shape:
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
