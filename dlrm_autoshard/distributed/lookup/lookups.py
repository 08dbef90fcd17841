"""Looks up vectors in two halves with other work in between: vectors travel forward, gradients backward.

for batch, ids in bags.ahead(batches, lambda batch: batch):    # sends its ids while the batch before is trained
    lookup = bags.look_up(ids)                   # on every rank; looks up, sends, and returns at once
    pooled_BD = lookup.wait(); loss.backward()   # gradients travel back to the owners, which update their tables
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.device_ids import DeviceIdDistribution
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.exchange import Exchange, Margin, Pending, with_margin, without_margin
from dlrm_autoshard.distributed.lookup.filled_bags import FilledBags
from dlrm_autoshard.distributed.lookup.id_distribution import IdDistribution, LocalIds
from dlrm_autoshard.distributed.lookup.sequences import NoSequences
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.errors import BagsError
from dlrm_autoshard.model.jagged import Jagged, Looked
from dlrm_autoshard.plan import ShardingPlan

AnyBatch = TypeVar("AnyBatch")


class SentIds:
    """A batch's ids, not sent, in progress, or with the tables' owners. Sent again if tables have moved since."""

    def __init__(self, batch: Batch, embeddings: ShardedEmbeddings) -> None:
        self.batch, self.embeddings = batch, embeddings
        self.asked = embeddings.dedup.asked(embeddings.rows_once.asked(batch), embeddings.exchange)
        self.looked_up: Callable[[], None] | None = None
        """Called once when vectors are on their way, to do other work."""
        self._on_the_way: IdDistribution | DeviceIdDistribution | None = None
        self._arrived: LocalIds | None = None
        self._plan: ShardingPlan | None = None

    @property
    def arrived(self) -> LocalIds | None:
        """The arrived ids; None if they have not arrived, or tables have moved since."""
        return self._arrived if self._plan is self.embeddings.plan else None

    def start(self) -> None:
        self._plan, self._arrived = self.embeddings.plan, None
        self._on_the_way = self.embeddings.distribute(self.asked.sent)

    def send_values(self) -> None:
        """Sends the ids after `start`, if there is other work before `finish`."""
        if self._on_the_way is not None:
            self._on_the_way.send_values()

    def finish(self) -> LocalIds:
        """Waits until the owners under the live plan have the ids."""
        while (arrived := self.arrived) is None:
            if self._on_the_way is None:
                self.start()
            assert self._on_the_way is not None
            self._arrived, self._on_the_way = self._on_the_way.finish(), None
        return arrived


class EmbeddingBags(nn.Module):
    """Tables on the ranks as one module for any training loop: `loss.backward()` updates them.

    plan: the live one. replicas: tables copied to every rank. overlap: wait late for what travels. Call on every rank,
    with equally many samples.
    """

    def __init__(
        self,
        sharded: ShardedEmbeddings,
        clock: StageClock,
        *,
        average: bool,
        overlap: bool = True,
        columns: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """average: the loss is the mean over this rank's samples, and gradients are averaged over ranks like DDP;
        False: it is this rank's share of the mean over all samples, and they are summed. overlap: False waits for each
        transfer where it starts. columns: the output's column for each wanted one, and the inverse; None: the order of
        `sharded.output_tables`."""
        super().__init__()
        self.sharded, self.clock, self.device, self.replicas = sharded, clock, sharded.device, sharded.replicas
        self.average, self.overlap, self.columns = average, overlap, columns
        self._ahead: SentIds | None = None  # in progress
        self._heard: list[Callable[[LocalIds, int], None]] = []

    @property
    def plan(self) -> ShardingPlan:
        return self.sharded.plan

    @property
    def table_lr(self) -> float:
        """The fused optimizer's learning rate. Set it between steps."""
        return self.sharded.learning_rate

    @table_lr.setter
    def table_lr(self, lr: float) -> None:
        self.sharded.set_learning_rate(lr)

    @property
    def overlaps(self) -> bool:
        """Whether transfers overlap other work; False in sampled steps, which time each stage by itself."""
        return self.overlap and not self.clock.sampled

    def on_lookup(self, listener: Callable[[LocalIds, int], None]) -> None:
        """Calls `listener(ids, B)` at each training lookup with the ids that reached this rank; B samples per rank."""
        self._heard.append(listener)

    def forward(self, ids: Any, values_N: Tensor | None = None, weights_N: Tensor | None = None) -> Tensor | Looked:
        """Returns [B, sum of dims] float32; with sequences: that of the others, and each sequence's `Jagged` by
        name."""
        lookup = self._started(ids, values_N, weights_N)
        pooled_BD = lookup.wait()
        return Looked(pooled_BD, lookup.sequences) if self.sharded.features.sequences else pooled_BD

    def look_up(self, ids: Any, values_N: Tensor | None = None, weights_N: Tensor | None = None) -> Lookup:
        """Starts a lookup, with arguments as for `forward`. Work before `wait()` on the result overlaps the vectors'
        transfer, and its backward the gradients'. Sequences are the result's `sequences`."""
        lookup = self._started(ids, values_N, weights_N)
        if self.trains:
            self.clock.begin("dense_fwd")
        return lookup

    def send(self, ids: Any, values_N: Tensor | None = None, weights_N: Tensor | None = None) -> SentIds:
        """Sends ids, given as for `forward`, to the owners during the following backward pass. Call on every rank; pass
        the result to `forward` instead of the ids. Tables may move in between."""
        sent = self._given(ids, values_N, weights_N)
        self.arrive(timed=False)
        self._ahead = sent
        if self.overlaps:
            sent.start()
        return sent

    def ahead(self, batches: Iterable[AnyBatch], ids_of: Callable[[AnyBatch], Any]) -> Ahead[AnyBatch]:
        """Yields batches with their ids, for `forward` or `look_up`, which fetch the next batch and send its ids.
        ids_of: a batch's arguments for `forward`: a tuple (lengths_TB, values_N), or with weights_N, or a
        KeyedJaggedTensor."""

        def sent_of(batch: AnyBatch) -> SentIds:
            ids = ids_of(batch)
            return self._given(*ids) if isinstance(ids, tuple) else self._given(ids)

        return Ahead(self, batches, sent_of)

    @property
    def trains(self) -> bool:
        """Whether a backward pass will follow a lookup."""
        return self.training and torch.is_grad_enabled()

    def _given(self, ids: Any, values_N: Tensor | None = None, weights_N: Tensor | None = None) -> SentIds:
        """ids: a checked `Batch`, or SentIds."""
        if isinstance(ids, Batch):
            return SentIds(self.sharded.dense_on_device(ids), self.sharded)
        if ids.embeddings is not self.sharded:
            raise BagsError("these ids were sent by other ShardedEmbeddingBags. Use those of this one's `send`.")
        if values_N is not None or weights_N is not None:
            raise BagsError("sent ids already include their values and weights.")
        sent: SentIds = ids
        return sent

    def _started(self, ids: Any, values_N: Tensor | None, weights_N: Tensor | None) -> Lookup:
        sent = self._given(ids, values_N, weights_N)
        lookup, follow = self._looked_up(sent), sent.looked_up
        if follow is not None:
            sent.looked_up = None
            follow()
        return lookup

    def _looked_up(self, sent: SentIds) -> Lookup:
        sharded, clock, training = self.sharded, self.clock, self.trains
        ids = self.ids(sent, timed=training)
        rows = sharded.sequences.of(ids, sent.asked), sharded.dedup.exchange_of(sharded.exchange, ids, sent.asked)
        for listener in self._heard if training else ():
            listener(ids, ids.batch_size)
        with clock.stage("fwd_compute") if training else nullcontext():
            local = [sharded.lookup(ids, training=training), *rows[0].look_up(sharded.storage)]
        if not training:
            return Lookup(_Halves(self, sent.batch, *rows, training=False), [own.detach() for own in local])
        first = next((vectors.grad_fn for vectors in local if vectors.grad_fn is not None), None)
        if first is None:  # no tables here; otherwise this node was made first, so autograd runs it last
            local[0].register_post_accumulate_grad_hook(lambda _: self._updated())
        else:
            first.register_hook(lambda *_: self._updated())
        clock.barrier("fwd_comms")
        with clock.stage("fwd_comms"):
            return Lookup(_Halves(self, sent.batch, *rows, training=True), local)

    def _updated(self) -> None:
        """Runs after the backward pass has updated the tables; waits for ids that were sent ahead."""
        self.clock.end()
        if self.replicas is not None:
            with self.clock.stage("grad_allreduce"):
                self.replicas.finish_alone()
        self.arrive(timed=True)

    # -- ids ahead: one batch's at a time, during another's backward pass ----------------------------------------------

    def send_values(self) -> None:
        if self._ahead is not None:
            self._ahead.send_values()

    def arrive(self, *, timed: bool) -> None:
        """Waits for ids sent ahead. timed: count it as a stage of the training step."""
        if self._ahead is not None:
            self.ids(self._ahead, timed=timed)

    def ids(self, sent: SentIds, *, timed: bool) -> LocalIds:
        """Returns the arrived ids of this rank's tables; finishes those sent earlier first."""
        if sent.arrived is not None and sent is not self._ahead:
            return sent.arrived
        if timed:
            self.clock.barrier("input_dist")
        with self.clock.stage("input_dist") if timed else nullcontext():
            ahead, self._ahead = self._ahead, None
            if ahead is not None:
                ahead.finish()
            return sent.finish()


class Ahead(Generic[AnyBatch]):
    """Iterates over batches with ids that are with their owners in time: while a batch's vectors travel, the next batch
    is fetched and its ids are sent. On a GPU one more batch is ahead, so that its rows can be fetched to the device."""

    def __init__(
        self, bags: EmbeddingBags, batches: Iterable[AnyBatch], sent_of: Callable[[AnyBatch], SentIds]
    ) -> None:
        """Sends the first ids at once. Collective."""
        self._bags, self._batches, self._sent_of = bags, iter(batches), sent_of
        self._waiting: deque[tuple[AnyBatch, SentIds]] = deque()
        self._bring()

    def __iter__(self) -> Iterator[tuple[AnyBatch, SentIds]]:
        return self

    def __next__(self) -> tuple[AnyBatch, SentIds]:
        self._bring()
        if not self._waiting:
            raise StopIteration
        batch, sent = self._waiting.popleft()
        sent.looked_up = self._follow
        return batch, sent

    def _bring(self) -> None:
        """Waits until the owners have the ids of as many batches as wanted; sends again if tables have moved."""
        self._fetch(self._bags.sharded.batches_ahead - len(self._waiting))
        for _, sent in self._waiting:
            self._bags.ids(sent, timed=False)

    def _fetch(self, count: int) -> bool:
        fetched = [(batch, self._sent_of(batch)) for batch in islice(self._batches, max(0, count))]
        self._waiting += fetched
        return bool(fetched)

    def _follow(self) -> None:
        bags = self._bags
        if bags.overlaps and self._waiting and (ids := self._waiting[0][1].arrived) is not None:
            bags.sharded.prefetch(ids)
        with bags.clock.stage("data_wait"):
            fetched = self._fetch(1)
        if fetched:
            bags.send(self._waiting[-1][1])


class Lookup:
    """Pooled vectors on their way to the asking ranks. Wait for each lookup once, in any order; cancel or drop those no
    longer needed."""

    def __init__(self, halves: _Halves, local: list[Tensor]) -> None:
        """local: the owner's vectors: of all tables looked up together, then of each table with sequences."""
        self.batch, self._halves = halves.batch, halves
        self._token: Tensor = _Send.apply(halves, *local)
        self.sequences: dict[str, Jagged] = {}  # unpooled vectors, after `wait()`

    def wait(self, margin: Margin = (0, 0), into: Tensor | None = None) -> Tensor:
        """Returns this rank's pooled vectors [B, margin + D + margin], which may be changed in place. margin: free
        columns before and after them. into: memory to use."""
        if self._halves.vectors is None:
            raise BagsError("a lookup was waited for twice, or after its cancel(). Keep the result of `wait()`.")
        pooled, *of_sequences = _Wait.apply(self._token, self._halves, margin, into)
        self.sequences = self._halves.by_name(of_sequences)
        return pooled

    def cancel(self) -> None:
        """Undoes the lookup. On every rank, before a backward pass or instead of it."""
        self._halves.cancel()


class _Halves:
    """Does the work of a lookup's two autograd nodes; holds none of their tensors, which would make reference cycles.

    Autograd runs later nodes first, so backward runs in reverse: `_Wait` sends the gradients, the work between the
    halves runs while they travel, `_Send` receives them, and fbgemm's node updates the tables.
    """

    def __init__(
        self, bags: EmbeddingBags, batch: Batch, rows: NoSequences, exchange: Exchange | FilledBags, *, training: bool
    ) -> None:
        self.batch, self._bags, self._rows, self._exchange, self._training = batch, bags, rows, exchange, training
        self._replicated = None if bags.replicas is None else bags.replicas.look_up(batch, training=training)
        self._plan = bags.sharded.plan
        self.vectors: Pending | None = None
        self._gradients: Pending  # from `send_gradients` to `receive_gradients`
        self._over = False

    def by_name(self, of_sequences: Sequence[Tensor]) -> dict[str, Jagged]:
        if self._training:
            self._bags.clock.begin("dense_fwd")
        return self._rows.by_name(of_sequences)

    def cancel(self) -> None:
        if self._over:
            return
        if self.vectors is not None:
            self.vectors.wait()
        if self._training:
            self._bags.sharded.take_back_lookup()
        self.vectors = self._replicated = None
        self._over = True

    def send(self, pooled: Tensor, *local: Tensor) -> None:
        pending = self._exchange.send_pooled(self._rows.with_pooled(pooled, local))
        self.vectors = self._rows.send(local, pending)
        if not self._bags.overlaps:
            self.vectors.wait()

    def receive(self, margin: Margin, into: Tensor | None) -> list[Tensor]:
        """Returns the pooled vectors, and each sequence's."""
        sharded, columns, vectors = self._bags.sharded, self._bags.columns, self.vectors
        self._check_plan()
        assert vectors is not None
        self.vectors = None  # frees memory early
        inner = margin if columns is None else (0, 0)
        stage = self._bags.clock.stage if self._training else lambda _: nullcontext()
        with stage("fwd_comms"):
            pooled_BD = self._exchange.in_output_order(vectors.wait(), inner, into if columns is None else None)
            if sharded.means is not None:
                sharded.means.divide_(pooled_BD, self.batch.lengths_TB, inner)
            of_sequences = self._rows.values()
            if self._replicated is None:
                return [self._as_given(pooled_BD, margin, into), *of_sequences]
        with stage("dense_fwd"):  # equal on every rank, whatever the plan
            self._replicated.put(pooled_BD, inner[0])
            return [self._as_given(pooled_BD, margin, into), *of_sequences]

    def _as_given(self, pooled_BD: Tensor, margin: Margin, into: Tensor | None) -> Tensor:
        """Puts columns in the order of the given tables."""
        columns = self._bags.columns
        if columns is None:
            return pooled_BD
        pooled_BD = pooled_BD.index_select(1, columns[0])
        return with_margin(pooled_BD, margin, into) if any(margin) or into is not None else pooled_BD

    def send_gradients(self, gradient_BD: Tensor, of_sequences: Sequence[Tensor], margin: Margin) -> None:
        bags, sharded, clock = self._bags, self._bags.sharded, self._bags.clock
        if self._over:
            raise BagsError(
                "a second backward pass came through one lookup, or one after its cancel(), which would update the "
                "tables again. Add the losses, and call backward() once."
            )
        self._check_plan()
        self._over = True
        clock.barrier("bwd_comms")
        with clock.stage("bwd_comms"):
            if bags.columns is not None:
                gradient_BD = without_margin(gradient_BD, margin).index_select(1, bags.columns[1])
                margin = (0, 0)
            if bags.average:
                gradient_BD = gradient_BD / sharded.world_size
                of_sequences = [gradient / sharded.world_size for gradient in of_sequences]
            if sharded.clipping is not None:
                gradient_BD = sharded.clipping.cut(gradient_BD, margin)
                of_sequences = sharded.clipping.cut_sequences([*of_sequences])
            if sharded.means is not None:
                copied = bags.average or sharded.clipping is not None
                own = gradient_BD if copied else gradient_BD.clone()  # others may read autograd's tensor
                gradient_BD = sharded.means.divide_(own, self.batch.lengths_TB, margin)
            pending = self._exchange.send_gradients(gradient_BD.contiguous(), margin)
            self._gradients = self._rows.send_gradients(of_sequences, pending)
            if not bags.overlaps:
                self._gradients.wait()
        clock.begin("dense_bwd")
        if self._replicated is not None:
            self._replicated.add_gradient(gradient_BD, margin[0])

    def receive_gradients(self) -> list[Tensor]:
        """Returns gradients [W * B, D_local] for the kernel that updates the tables, and those of each table with
        sequences."""
        bags, clock, gradients = self._bags, self._bags.clock, self._gradients
        del self._gradients
        clock.end()
        bags.send_values()
        arrived = self._rows.as_gradients(self._exchange.as_gradient(gradients.wait()))
        clock.begin("bwd_compute")
        return arrived

    def _check_plan(self) -> None:
        if self._plan is not self._bags.sharded.plan:
            raise BagsError(
                "tables moved between look_up and its backward pass. Move them, or call Autoshard.step(), after it."
            )


class _Send(torch.autograd.Function):
    """Autograd node from the local vectors to a token that stands for them in transit."""

    @staticmethod
    def forward(ctx: Any, lookup: _Halves, *local: Tensor) -> Tensor:
        ctx.lookup, ctx.shapes = lookup, [vectors.shape for vectors in local]
        lookup.send(*local)
        return local[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.lookup.receive_gradients()
        return None, *(gradient.view(shape) for gradient, shape in zip(gradients, ctx.shapes, strict=True))


class _Wait(torch.autograd.Function):
    """Autograd node from the token to the arrived vectors."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, lookup: _Halves, margin: Margin, into: Tensor | None) -> tuple[Tensor, ...]:
        ctx.lookup, ctx.margin = lookup, margin
        # The same memory, but not as a view, which could not be changed in place.
        return tuple(one.new_empty(0).set_(one) for one in lookup.receive(margin, into))  # type: ignore[call-overload]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BD: Tensor, *of_sequences: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.lookup.send_gradients(gradient_BD, of_sequences, ctx.margin)
        return gradient_BD.new_zeros(()), None, None, None
