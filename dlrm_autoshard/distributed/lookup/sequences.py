"""Unpooled vectors: one per id, from the owners of its table's shards to the asking rank, and back.

A table that a sequence looks up has its own fused lookup, with a bag per id of a sequence and per bag of the table's
pooled features, so that all gradients of a row enter one update, as autograd would sum them. Distinct ids may be sent
once (`data/rows_once.py`), which owners do not notice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.data.bags_once import SameBags
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.data.rows_once import SameRows, ids_and_different, rows_once
from dlrm_autoshard.distributed.lookup.exchange import Exchange, Pending
from dlrm_autoshard.distributed.lookup.id_distribution import LocalIds
from dlrm_autoshard.distributed.lookup.wire import Wire
from dlrm_autoshard.distributed.tables.storage import Storage
from dlrm_autoshard.model.jagged import Jagged

# Axes: B samples per rank, W ranks, N ids, D embedding dims, R bags of one table's lookup.


MOST_DIFFERENT = {"memory": 0.4, "network": 0.65}
"""Fraction of distinct ids in a batch up to which sending each once saves time, by `bench sequences` with less skew.
Constants, so that a restarted job decides alike."""


def travel_once(different: float, world_size: int, *, in_memory: bool) -> bool:
    """Returns whether to send distinct rows of sequences once. different: fraction of a rank's ids that are distinct.
    in_memory: no network is involved."""
    return world_size > 1 and different <= MOST_DIFFERENT["memory" if in_memory else "network"]


@dataclass(frozen=True)
class Asked:
    """A rank's batch: as given, and as its ids are sent. same: for each sequence, how to restore ids sent once; bags:
    the same for pooled features."""

    batch: Batch
    sent: Batch
    same: Sequence[SameRows] = ()
    bags: SameBags | None = None


class RowsOnce:
    """Decides for the whole job whether distinct ids of sequences are sent once. chosen: None until the first batch."""

    def __init__(self, features: Features, chosen: bool | None, group: dist.ProcessGroup, *, in_memory: bool) -> None:
        self._numbers, self._group, self._in_memory = features.sequence_numbers, group, in_memory
        self.chosen = chosen if self._numbers else False

    def asked(self, batch: Batch) -> Asked:
        """Returns the batch as its ids are to be sent. Collective at the first decision."""
        if self.chosen is None:
            counts = torch.tensor(ids_and_different(batch, self._numbers))
            dist.all_reduce(counts, group=self._group)
            ids, different = counts.tolist()
            ranks = dist.get_world_size(self._group)
            self.chosen = travel_once(different / max(ids, 1), ranks, in_memory=self._in_memory)
        return Asked(batch, *rows_once(batch, self._numbers)) if self.chosen else Asked(batch, batch)


class SequencePlan:
    """Lookups of tables with sequences under one plan; such tables are stored apart from the others."""

    def __init__(self, exchange: Exchange) -> None:
        features = exchange.features
        apart = features.sequence_table_names
        self.exchange, self.names = exchange, features.sequences
        self.numbers = features.sequence_numbers
        self.sent_by = [[(s, f) for s, f in own if f in self.numbers] for own in exchange.owned]
        """Each rank's sequences: (shard, feature)."""
        own = exchange.owned[exchange.rank]
        self.num_fused = sum(shard.shard.table not in apart for shard, _ in own)
        """Number of this rank's lookups of other tables, which come first."""
        self.fused_dim = sum(shard.embedding_dim for shard, _ in own[: self.num_fused])
        self.lookups = [(shard, feature not in self.numbers) for shard, feature in own[self.num_fused :]]
        """(shard, whether it is pooled) of each lookup apart, those of a shard side by side."""
        self.shards = list(dict.fromkeys(shard for shard, _ in self.lookups))

    @property
    def local_unpooled(self) -> list[bool] | None:
        """Which of this rank's lookups are of sequences; None without sequences."""
        fused = [False] * self.num_fused
        return [*fused, *(not pooled for _, pooled in self.lookups)] if self.names else None

    def of(self, ids: LocalIds, asked: Asked) -> NoSequences:
        """Returns one batch's sequence lookup. ids: of this rank's tables. asked: by this rank."""
        return SequenceLookup(self, ids, asked) if self.names else NoSequences()

    def fused(self, ids: LocalIds) -> LocalIds:
        """Returns the ids of tables that are looked up together."""
        if not self.names:
            return ids
        bags = self.num_fused * self.exchange.world_size * ids.batch_size
        count = int(ids.offsets[bags])
        weights_N = None if ids.weights_N is None else ids.weights_N[:count]
        return LocalIds(ids.values_N[:count], ids.offsets[: bags + 1], ids.batch_size, weights_N)


class NoSequences:
    """Handles one batch's vectors of tables with sequences, from lookup to update; this one is for none."""

    def look_up(self, storage: Storage) -> list[Tensor]:
        """Returns [R, D] of each table; with gradients on, the fused update is the gradient function."""
        return []

    def with_pooled(self, together: Tensor, looked_up: Sequence[Tensor]) -> Tensor:
        """Returns pooled vectors [W * B, D_local] of all tables, those apart behind the others."""
        return together

    def send(self, looked_up: Sequence[Tensor], beside: Pending) -> Pending:
        """Sends vectors to the asking ranks. The result waits for these and `beside`."""
        return beside

    def values(self) -> list[Tensor]:
        """Returns the arrived vectors [N, D] float32 of each sequence."""
        return []

    def by_name(self, values: Sequence[Tensor]) -> dict[str, Jagged]:
        return {}

    def send_gradients(self, gradients: Sequence[Tensor], beside: Pending) -> Pending:
        """Sends gradients of `values` to the owners. The result waits for these and `beside`."""
        return beside

    def as_gradients(self, pooled: Tensor) -> list[Tensor]:
        """Returns gradients of the tables looked up together, and of each table apart. pooled: of `with_pooled`."""
        return [pooled]


class SequenceLookup(NoSequences):
    """One batch's lookup of unpooled vectors."""

    def __init__(self, plan: SequencePlan, ids: LocalIds, asked: Asked) -> None:
        """ids: of this rank's tables. asked: by this rank."""
        self._plan, self._exchange, self._ids, self._bags = plan, plan.exchange, ids, ids.batch_size
        self._lengths_FB, self._same = asked.batch.lengths_TB, asked.same
        ends = ids.offsets[plan.num_fused * self._bags * self._exchange.world_size :: self._bags].tolist()
        world_size, counts = self._exchange.world_size, [b - a for a, b in itertools.pairwise(ends)]
        self._starts = ends[::world_size]  # of each lookup's ids, and the end
        self._counts = [counts[first : first + world_size] for first in range(0, len(counts), world_size)]
        """Each lookup's number of ids from each rank."""
        self._bags *= world_size
        self._vectors, self._gradients = plan.exchange.wires
        self._arriving: Pending | list[list[Tensor]] = []
        self._rows = [self._bags if p else sum(n) for (_, p), n in zip(plan.lookups, self._counts, strict=True)]
        sent = dict(zip(plan.numbers, asked.sent.lengths_TB[plan.numbers].sum(1).tolist(), strict=True))
        self._coming = [[sent[f] * shard.embedding_dim for shard, f in own] for own in plan.sent_by]
        """Number of elements of each sequence that each rank sends to this one."""
        self._leaving = [
            [n[rank] * s.embedding_dim for (s, p), n in zip(plan.lookups, self._counts, strict=True) if not p]
            for rank in range(world_size)
        ]
        """Number of elements of each sequence that this rank sends to each."""

    def look_up(self, storage: Storage) -> list[Tensor]:
        ids, found, first = self._ids, list[Tensor](), 0
        for shard in self._plan.shards:
            own = [number for number, (other, _) in enumerate(self._plan.lookups) if other is shard]
            start, stop = self._starts[own[0]], self._starts[own[-1] + 1]
            bags = list[Tensor]()
            for number in own:
                if self._plan.lookups[number][1]:
                    first = (self._plan.num_fused + number) * self._bags
                    bags.append(ids.offsets[first : first + self._bags] - start)
                else:
                    begin, end = self._starts[number : number + 2]
                    bags.append(torch.arange(begin - start, end - start, dtype=ids.offsets.dtype))
            # fbgemm needs at least one bag.
            ends = ids.offsets.new_full((1 if any(map(len, bags)) else 2,), stop - start)
            weights_N = None if ids.weights_N is None else ids.weights_N[start:stop]
            offsets = torch.cat([*bags, ends])
            found.append(storage.look_up_apart(shard.shard, ids.values_N[start:stop], offsets, weights_N))
        return found

    def with_pooled(self, together: Tensor, looked_up: Sequence[Tensor]) -> Tensor:
        parts = self._of_lookups(looked_up)
        pooled = [part for part, (_, is_pooled) in zip(parts, self._plan.lookups, strict=True) if is_pooled]
        return torch.cat([together, *pooled], 1) if pooled else together

    def send(self, looked_up: Sequence[Tensor], beside: Pending) -> Pending:
        blocks: list[list[Tensor]] = [[] for _ in self._leaving]  # of each rank
        for part, counts, (_, is_pooled) in zip(
            self._of_lookups(looked_up), self._counts, self._plan.lookups, strict=True
        ):
            for rank, block in enumerate(() if is_pooled else part.split(counts)):
                blocks[rank].append(self._vectors.encode(block))
        return self._send(self._vectors, blocks, self._leaving, self._coming, beside)

    def values(self) -> list[Tensor]:
        parts: dict[int, dict[int, Tensor]] = {feature: {} for feature in self._plan.numbers}
        blocks = itertools.chain.from_iterable(self._arrived(self._coming, self._vectors.decode))
        for shard, feature in itertools.chain.from_iterable(self._plan.sent_by):
            parts[feature][shard.columns[0]] = next(blocks).view(-1, shard.embedding_dim)
        in_order = [[own[column] for column in sorted(own)] for own in parts.values()]
        values = [own[0] if len(own) == 1 else torch.cat(own, 1) for own in in_order]
        return [same.expanded(own) for same, own in zip(self._same, values, strict=True)] if self._same else values

    def by_name(self, values: Sequence[Tensor]) -> dict[str, Jagged]:
        return {
            name: Jagged(own, self._lengths_FB[number])
            for name, number, own in zip(self._plan.names, self._plan.numbers, values, strict=True)
        }

    def send_gradients(self, gradients: Sequence[Tensor], beside: Pending) -> Pending:
        if self._same:
            gradients = [same.summed(own) for same, own in zip(self._same, gradients, strict=True)]
        of_feature = dict(zip(self._plan.numbers, gradients, strict=True))
        blocks = [
            [
                self._gradients.encode(of_feature[f][:, slice(*shard.columns)].contiguous(), shares=self._bags)
                for shard, f in own
            ]
            for own in self._plan.sent_by
        ]
        return self._send(self._gradients, blocks, self._coming, self._leaving, beside)

    def as_gradients(self, pooled: Tensor) -> list[Tensor]:
        pooled = pooled.view(self._bags, self._exchange.local_dim)
        leaving = self._leaving
        if len(self._plan.lookups) == 1:  # all ranks' gradients are contiguous
            leaving = [[sum(map(sum, leaving))]]
        from_rank = self._arrived(leaving, partial(self._gradients.decode, shares=self._bags))
        parts: dict[str, list[Tensor]] = {shard.name: [] for shard in self._plan.shards}
        sequences, column = itertools.count(), self._plan.fused_dim
        for shard, is_pooled in self._plan.lookups:
            if is_pooled:
                parts[shard.name].append(pooled[:, column : column + shard.embedding_dim])
                column += shard.embedding_dim
            else:
                number = next(sequences)
                parts[shard.name] += [own[number].view(-1, shard.embedding_dim) for own in from_rank]
        gradients = [own[0] if len(own) == 1 else torch.cat(own) for own in parts.values()]
        return [
            pooled[:, : self._plan.fused_dim].contiguous(),
            *(gradient if len(gradient) else gradient.new_zeros(1, gradient.shape[1]) for gradient in gradients),
        ]

    def _of_lookups(self, looked_up: Sequence[Tensor]) -> list[Tensor]:
        """Returns the rows of each lookup apart."""
        rows = dict[str, list[int]]()
        for (shard, _), count in zip(self._plan.lookups, self._rows, strict=True):
            rows.setdefault(shard.name, []).append(count)
        return [
            part
            for table, own in zip(looked_up, rows.values(), strict=True)
            for part in table.detach()[: sum(own)].split(own)
        ]

    def _send(
        self,
        wire: Wire,
        blocks: list[list[Tensor]],
        leaving: list[list[int]],
        coming: list[list[int]],
        beside: Pending,
    ) -> Pending:
        """Sends each rank's encoded blocks. The result waits for these and `beside`."""
        e = self._exchange
        if e.world_size == 1:
            self._arriving = blocks
            return beside
        arriving = self._arriving = e.all_to_all(
            "sequences",
            e.empty(torch.empty(0, dtype=wire.dtype, device=e.device), wire.size(sum(map(sum, coming)))),
            lambda rank, into: torch.cat(blocks[rank], out=into),
            [wire.size(sum(own)) for own in coming],
            [wire.size(sum(own)) for own in leaving],
        )
        return Pending(lambda: (beside.wait(), arriving.wait()), beside.result)

    def _arrived(self, coming: list[list[int]], decode: Callable[[Tensor], Tensor]) -> list[Sequence[Tensor]]:
        """Returns the blocks from each rank, flat. coming: their numbers of elements."""
        arriving, self._arriving = self._arriving, []  # frees memory early
        if not isinstance(arriving, Pending):
            return [[decode(block) for block in own] for own in arriving]
        flat = decode(arriving.wait()).split([sum(own) for own in coming])
        return [part.split(own) for part, own in zip(flat, coming, strict=True)]
