"""One training step, as any PyTorch loop has it, with the next batch's ids on their way beside it.

With `overlap`, whatever travels is started early and waited for late: the bottom MLP runs while vectors travel, its
backward while gradients travel, the dense all-reduce behind the fused table update, a following batch's ids behind
all of it. Results are bit-equal without: what travels does not depend on what is computed meanwhile.
Sampled steps wait at once after each start, so that each stage's time is its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.dense_passes import DensePasses
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.id_distribution import LocalIds
from dlrm_autoshard.distributed.lookup.lookups import Lookups, SentIds
from dlrm_autoshard.distributed.passes_in_parts import PassesInParts
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
        accumulate: int = 1,
        all_finite: Callable[[Tensor], bool] | None = None,
    ) -> None:
        """dense: of losses that are summed. autocast: dense products of bf16. graphs: on a GPU, the dense part's passes
        as CUDA graphs. accumulate: parts of a batch that the dense part takes one after the other. all_finite: asked
        with each local loss, before any update; all ranks must agree. None: not asked."""
        self.model, self.dense, self.embeddings, self.clock = model, dense, embeddings, clock
        self.lookups = Lookups(embeddings, clock, average=False, overlap=overlap, arrive=False)
        dense.clock, dense.overlap = clock, overlap
        self._all_finite = all_finite
        self.passes: DensePasses | RecordedPasses = DensePasses(model, autocast=autocast)
        if accumulate > 1:
            self.passes = PassesInParts(model, accumulate, autocast=autocast)
        elif graphs and embeddings.device.type == "cuda":
            width = sum(table.embedding_dim for table in embeddings.output_tables)
            self.passes = RecordedPasses(model, width, autocast=autocast, record=CudaGraphs(embeddings.device))
        self._waiting: deque[SentIds] = deque()

    def begin_epoch(self, batches: Iterator[Batch]) -> bool:
        """Fetches the first batches and their ids. False where there is none."""
        self._batches = batches
        self._waiting.clear()
        while len(self._waiting) < self.embeddings.batches_ahead and self._fetch():
            pass
        self.redistribute()
        return not self.exhausted

    def redistribute(self) -> None:
        """Brings the waiting batches' ids to their owners, who are others after tables have moved."""
        for sent in self._waiting:
            self.lookups.ids(sent, timed=False)

    @property
    def ids(self) -> LocalIds | None:
        """Those of the batch that the next `run` trains on."""
        return None if self.exhausted else self._waiting[0].arrived

    @property
    def exhausted(self) -> bool:
        return not self._waiting

    @property
    def last_loss_finite(self) -> bool:
        """Whether this rank's share of the last step's loss is."""
        return bool(torch.isfinite(self._loss))

    def run(self, lr_scale: float, table_lr: float, *, sampled: bool = False) -> Batch:
        """One step on the batch that has waited longest; afterwards another waits. Returns the batch trained on."""
        clock, dense, lookups, passes = self.clock, self.dense, self.lookups, self.passes
        sent = self._waiting[0]
        batch = sent.batch
        with clock.step(sampled=sampled):
            self.embeddings.set_learning_rate(table_lr)
            kept = None if self._all_finite is None else dense.kept_buffers()
            lookup = lookups.look_up(sent)  # whose vectors travel while the bottom runs
            self._prefetch()
            self._send_following()
            clock.begin("dense_fwd")
            bottom = passes.bottom(batch)
            loss = passes.top(bottom, lookup.wait(self.model.margin, passes.place), batch, lookup.sequences)
            self._loss = loss.detach()
            clock.end()
            if self._all_finite is not None and kept is not None and not self._all_finite(self._loss):
                passes.give_up()
                dense.restore_buffers(kept)  # of BatchNorm, say, which has seen the batch
                lookup.cancel()
                self._advance()
                raise NotFinite(batch)
            clock.begin("dense_bwd")
            passes.backward(loss, dense)  # updates the tables, too
            dense.step(lr_scale)
            self._advance()
        return batch

    def _prefetch(self) -> None:
        """The next batch's rows, beside the step, where some lie in host memory."""
        if self.lookups.overlaps and len(self._waiting) > 1 and (ids := self._waiting[1].arrived) is not None:
            self.embeddings.prefetch(ids)

    def _send_following(self) -> None:
        with self.clock.stage("data_wait"):
            fetched = self._fetch()
        if fetched:
            self.lookups.send(self._waiting[-1])

    def _fetch(self) -> bool:
        batch = next(self._batches, None)
        if batch is not None:
            self._waiting.append(SentIds(self.embeddings.dense_on_device(batch), self.embeddings))
        return batch is not None

    def _advance(self) -> None:
        """The batch of this step goes, and the following one's ids come home."""
        self._waiting.popleft()
        self.lookups.arrive(timed=True)
