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
from dlrm_autoshard.distributed.dense_passes import DensePasses
from dlrm_autoshard.distributed.lookup.device_ids import DeviceIdDistribution
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.exchange import Pending
from dlrm_autoshard.distributed.lookup.id_distribution import IdDistribution, LocalIds
from dlrm_autoshard.distributed.recorded_passes import CudaGraphs, RecordedPasses
from dlrm_autoshard.distributed.stage_clock import StageClock
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
        graphs: bool = False,
        all_finite: Callable[[Tensor], bool] | None = None,
    ) -> None:
        """autocast: dense products of bf16. graphs: on a GPU, the dense part's passes as CUDA graphs. all_finite: asked
        with each local loss, before any update; all ranks must agree. None: not asked."""
        self.model, self.dense, self.embeddings, self.clock = model, dense, embeddings, clock
        self._overlap, self._all_finite = overlap, all_finite
        self.passes = DensePasses(model, autocast=autocast)
        if graphs and embeddings.device.type == "cuda":
            width = sum(table.embedding_dim for table in embeddings.tables)
            recorder = CudaGraphs(embeddings.device)
            self.passes = RecordedPasses(model, width, autocast=autocast, record=recorder)
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
        clock, dense, embeddings, model, passes = self.clock, self.dense, self.embeddings, self.model, self.passes
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
            with clock.stage("dense_fwd"):
                passes.bottom(batch)
            with clock.stage("fwd_comms"):
                pooled = embeddings.in_output_order(vectors.wait(), model.margin, passes.place)
                if embeddings.means is not None:
                    embeddings.means.divide_(pooled, batch.lengths_TB, model.margin)
                del vectors
            with clock.stage("dense_fwd"):
                self._loss = passes.top(pooled)
                del pooled
            if self._all_finite is not None and kept is not None and not self._all_finite(self._loss):
                passes.give_up()
                dense.restore_buffers(kept)  # of BatchNorm, say, which has seen the batch
                embeddings.take_back_lookup()
                self._advance(following, following_ids)
                raise NotFinite(batch)

            with clock.stage("dense_bwd"):
                pooled_gradient = passes.backward_top()
            clock.barrier("bwd_comms")
            with clock.stage("bwd_comms"):
                if embeddings.means is not None:  # of a copy: what a graph gives is compared with what kernels give
                    pooled_gradient = embeddings.means.divide_(pooled_gradient.clone(), batch.lengths_TB, model.margin)
                gradients = self._settle(embeddings.send_gradients(pooled_gradient, model.margin))
                del pooled_gradient
            with clock.stage("dense_bwd"):
                passes.backward_bottom()
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
