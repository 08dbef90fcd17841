"""Looks vectors up in two halves, between which other work runs: vectors travel forward, gradients backward.

sent = SentIds(batch, embeddings); lookups.send(sent)        # ahead, if at all: while another batch is trained
lookup = lookups.look_up(sent)               # on every rank; looks up and sends, and returns at once
pooled_BD = lookup.wait(); loss.backward()   # gradients travel back to the owners, whose tables are updated
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.device_ids import DeviceIdDistribution
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.exchange import Margin, Pending, with_margin, without_margin
from dlrm_autoshard.distributed.lookup.id_distribution import IdDistribution, LocalIds
from dlrm_autoshard.distributed.lookup.sequences import NoSequences
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.errors import BagsError
from dlrm_autoshard.model.jagged import Jagged
from dlrm_autoshard.plan import ShardingPlan


class SentIds:
    """A batch's ids on their way to the tables' owners, or there. Those that reached former owners are sent again."""

    def __init__(self, batch: Batch, embeddings: ShardedEmbeddings) -> None:
        self.batch, self.embeddings = batch, embeddings
        self._on_the_way: IdDistribution | DeviceIdDistribution | None = None
        self._arrived: LocalIds | None = None
        self._plan: ShardingPlan | None = None

    @property
    def arrived(self) -> LocalIds | None:
        """None where they have not, or tables have moved since."""
        return self._arrived if self._plan is self.embeddings.plan else None

    def start(self) -> None:
        self._plan, self._arrived = self.embeddings.plan, None
        self._on_the_way = self.embeddings.distribute(self.batch)

    def send_values(self) -> None:
        """Once after `start`, where there is something else to do before `finish`."""
        if self._on_the_way is not None:
            self._on_the_way.send_values()

    def finish(self) -> LocalIds:
        """Waits until they are with the owners under the live plan."""
        while (arrived := self.arrived) is None:
            if self._on_the_way is None:
                self.start()
            assert self._on_the_way is not None
            self._arrived, self._on_the_way = self._on_the_way.finish(), None
        return arrived


class Lookups:
    """The lookups of one training loop in one set of tables, and the ids that were sent for the next one."""

    def __init__(
        self,
        embeddings: ShardedEmbeddings,
        clock: StageClock,
        *,
        average: bool,
        overlap: bool = True,
        columns: tuple[Tensor, Tensor] | None = None,
        arrive: bool = True,
    ) -> None:
        """average: the loss is the mean over this rank's samples, so gradients are averaged over ranks, as DDP does;
        False: it is this rank's share of the mean over all samples, and they are summed. overlap: False waits for each
        transfer where it starts. columns: the output's column of each wanted one, and the inverse. arrive: the backward
        pass ends when ids that were sent ahead have arrived; False: somebody calls `arrive` after it."""
        self.embeddings, self.clock, self.average, self.columns = embeddings, clock, average, columns
        self._overlap, self._arrive = overlap, arrive
        self._ahead: SentIds | None = None  # on their way

    @property
    def overlaps(self) -> bool:
        """False in sampled steps, so that each stage's time is its own."""
        return self._overlap and not self.clock.sampled

    def look_up(self, sent: SentIds, *, training: bool = True) -> Lookup:
        ids, embeddings, clock = self.ids(sent, timed=training), self.embeddings, self.clock
        sequences = embeddings.sequences.of(ids, sent.batch.lengths_TB)
        with clock.stage("fwd_compute") if training else nullcontext():
            local = [embeddings.lookup(ids, training=training), *sequences.look_up(embeddings.storage)]
        if not training:
            return Lookup(self, local, sent.batch, sequences, training=False)
        first = next((vectors.grad_fn for vectors in local if vectors.grad_fn is not None), None)
        if first is None:  # of no tables; else the node that was made first is the last that autograd takes
            local[0].register_post_accumulate_grad_hook(lambda _: self._updated())
        else:
            first.register_hook(lambda *_: self._updated())
        clock.barrier("fwd_comms")
        with clock.stage("fwd_comms"):
            return Lookup(self, local, sent.batch, sequences, training=True)

    def _updated(self) -> None:
        """The backward pass has updated the tables: its end, as far as they are concerned."""
        self.clock.end()
        if self.embeddings.replicas is not None:
            with self.clock.stage("grad_allreduce"):
                self.embeddings.replicas.finish_alone()
        if self._arrive:
            self.arrive(timed=True)

    # -- ids ahead: one batch's at a time, through the backward pass of another ----------------------------------------

    def send(self, sent: SentIds) -> None:
        self.arrive(timed=False)
        self._ahead = sent
        if self.overlaps:
            sent.start()

    def send_values(self) -> None:
        if self._ahead is not None:
            self._ahead.send_values()

    def arrive(self, *, timed: bool) -> None:
        """Waits for what was sent. timed: as a stage of the training step."""
        if self._ahead is not None:
            self.ids(self._ahead, timed=timed)

    def ids(self, sent: SentIds, *, timed: bool) -> LocalIds:
        """Those of this rank's tables, when they have arrived; what was sent before arrives first."""
        if sent.arrived is not None and sent is not self._ahead:
            return sent.arrived
        if timed:
            self.clock.barrier("input_dist")
        with self.clock.stage("input_dist") if timed else nullcontext():
            ahead, self._ahead = self._ahead, None
            if ahead is not None:
                ahead.finish()
            return sent.finish()


class Lookup:
    """Pooled vectors on their way to the ranks that asked for them. Each is waited for once, in any order; one that is
    not needed any more is cancelled, or just dropped.

    Each half is an autograd node. Autograd takes the node that was made last first, so backward runs the other way
    round: `_Wait` sends the gradients, whatever was computed between the halves runs while they travel, `_Send`
    receives them, and fbgemm's own node updates the tables.
    """

    def __init__(
        self, lookups: Lookups, local: list[Tensor], batch: Batch, rows: NoSequences, *, training: bool
    ) -> None:
        """local: what the tables' owner looked up: of all together, and of each one with sequences. rows: of these."""
        self._lookups, self._batch, self._rows, self._training = lookups, batch, rows, training
        self.sequences: dict[str, Jagged] = {}  # after `wait()`: the vectors that are not pooled
        replicas = lookups.embeddings.replicas
        self._replicated = None if replicas is None else replicas.look_up(batch, training=training)
        self._plan = lookups.embeddings.plan
        self._vectors: Pending | None = None
        self._gradients: Pending | None = None
        self._over = False
        self._token: Tensor | None = None
        if training:
            self._token = _Send.apply(self, *local)
        else:
            self.send(*local)

    def wait(self, margin: Margin = (0, 0), into: Tensor | None = None) -> Tensor:
        """[B, margin + D + margin] pooled vectors of this rank's samples; they may be changed in place. margin: columns
        left free before and after them. into: memory to put them in."""
        if self._vectors is None:
            raise BagsError("a lookup was waited for twice, or after it was cancelled. Keep what `wait()` gave.")
        if self._training:
            clock, token, self._token = self._lookups.clock, self._token, None
            pooled, *of_sequences = _Wait.apply(token, self, margin, into)
            clock.begin("dense_fwd")
        else:
            pooled, *of_sequences = self.receive(margin, into)
        self.sequences = self._rows.by_name(of_sequences)
        return pooled

    def cancel(self) -> None:
        """As if nothing had been looked up. On every rank, before a backward pass or in place of it."""
        if self._over:
            return
        if self._vectors is not None:
            self._vectors.wait()
        if self._training:
            self._lookups.embeddings.take_back_lookup()
        self._vectors = self._token = self._replicated = None
        self._over = True

    # -- what the two nodes do -----------------------------------------------------------------------------------------

    def send(self, pooled: Tensor, *local: Tensor) -> None:
        pending = self._lookups.embeddings.send_pooled(self._rows.with_pooled(pooled, local))
        self._vectors = self._rows.send(local, pending)
        if not self._lookups.overlaps:
            self._vectors.wait()

    def receive(self, margin: Margin, into: Tensor | None) -> list[Tensor]:
        """Pooled vectors, and each sequence's."""
        embeddings, columns, vectors = self._lookups.embeddings, self._lookups.columns, self._vectors
        self._check_plan()
        assert vectors is not None
        self._vectors = None  # memory that is done with goes at once
        inner = margin if columns is None else (0, 0)
        stage = self._lookups.clock.stage if self._training else lambda _: nullcontext()
        with stage("fwd_comms"):
            pooled_BD = embeddings.in_output_order(vectors.wait(), inner, into if columns is None else None)
            if embeddings.means is not None:
                embeddings.means.divide_(pooled_BD, self._batch.lengths_TB, inner)
            of_sequences = self._rows.values()
            if self._replicated is None:
                return [self._as_given(pooled_BD, margin, into), *of_sequences]
        with stage("dense_fwd"):  # on every rank alike: no plan changes what copies cost
            self._replicated.put(pooled_BD, inner[0])
            return [self._as_given(pooled_BD, margin, into), *of_sequences]

    def _as_given(self, pooled_BD: Tensor, margin: Margin, into: Tensor | None) -> Tensor:
        """With columns in the order in which the tables were given."""
        columns = self._lookups.columns
        if columns is None:
            return pooled_BD
        pooled_BD = pooled_BD.index_select(1, columns[0])
        return with_margin(pooled_BD, margin, into) if any(margin) or into is not None else pooled_BD

    def send_gradients(self, gradient_BD: Tensor, of_sequences: Sequence[Tensor], margin: Margin) -> None:
        lookups, embeddings, clock = self._lookups, self._lookups.embeddings, self._lookups.clock
        if self._over:
            raise BagsError(
                "a second backward pass came through one lookup, or one after its cancel(): each would update the "
                "tables. Add the losses up, and call backward() once."
            )
        self._check_plan()
        self._over = True
        clock.barrier("bwd_comms")
        with clock.stage("bwd_comms"):
            if lookups.columns is not None:
                gradient_BD = without_margin(gradient_BD, margin).index_select(1, lookups.columns[1])
                margin = (0, 0)
            if lookups.average:
                gradient_BD = gradient_BD / embeddings.world_size
                of_sequences = [gradient / embeddings.world_size for gradient in of_sequences]
            if embeddings.means is not None:
                own = gradient_BD if lookups.average else gradient_BD.clone()  # others may read what autograd gave
                gradient_BD = embeddings.means.divide_(own, self._batch.lengths_TB, margin)
            pending = embeddings.send_gradients(gradient_BD.contiguous(), margin)
            self._gradients = self._rows.send_gradients(of_sequences, pending)
            if not lookups.overlaps:
                self._gradients.wait()
        clock.begin("dense_bwd")
        if self._replicated is not None:
            self._replicated.add_gradient(gradient_BD, margin[0])

    def receive_gradients(self) -> list[Tensor]:
        """[W * B, D_local], for the kernel that updates the tables; and what each one's with sequences takes."""
        lookups, clock, gradients = self._lookups, self._lookups.clock, self._gradients
        assert gradients is not None
        self._gradients = None
        clock.end()
        lookups.send_values()
        arrived = self._rows.as_gradients(lookups.embeddings.as_gradient(gradients.wait()))
        clock.begin("bwd_compute")
        return arrived

    def _check_plan(self) -> None:
        if self._plan is not self._lookups.embeddings.plan:
            raise BagsError(
                "tables moved between look_up and the backward pass that belongs to it. Move them, or call "
                "Autoshard.step(), between steps."
            )


class _Send(torch.autograd.Function):
    """From a lookup to a token that stands for it on its way."""

    @staticmethod
    def forward(ctx: Any, lookup: Lookup, *local: Tensor) -> Tensor:
        ctx.lookup, ctx.shapes = lookup, [vectors.shape for vectors in local]
        lookup.send(*local)
        return local[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.lookup.receive_gradients()
        return None, *(gradient.view(shape) for gradient, shape in zip(gradients, ctx.shapes, strict=True))


class _Wait(torch.autograd.Function):
    """From that token to the vectors where they have arrived."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, lookup: Lookup, margin: Margin, into: Tensor | None) -> tuple[Tensor, ...]:
        ctx.lookup, ctx.margin = lookup, margin
        # The same memory as no view: a view could not be changed in place.
        return tuple(one.new_empty(0).set_(one) for one in lookup.receive(margin, into))  # type: ignore[call-overload]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BD: Tensor, *of_sequences: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.lookup.send_gradients(gradient_BD, of_sequences, ctx.margin)
        return gradient_BD.new_zeros(()), None, None, None
