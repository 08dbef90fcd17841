"""One batch's pooled vectors between ranks where those of empty bags stay: of bags of one id that a rank's batch has
several times, one is sent, and the rest are empty (data/bags_once.py).

A rank knows which of its bags each owner has filled, for it sent the ids. It gives each sample its bag's vector, and
adds the gradients of one bag's samples up, in the batch's order, before they travel to one fused update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_autoshard.data.bags_once import SameBags, bags_once
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.exchange import Exchange, Margin, Pending, with_margin, without_margin
from dlrm_autoshard.distributed.lookup.id_distribution import LocalIds

# Axes: B samples a rank, W ranks, L lookups of pooled features, K chunks of their columns, as wide as all shards allow.
# Vectors travel by chunk of columns, then by bag.


class Chunks:
    """Chunks of pooled vectors under one plan. own: numbers of this rank's pooled lookups, and their widths in chunks;
    asked: numbers of all ranks', among the features that are sent; of_rank: chunks from each rank. By chunk that
    arrives: its feature, and its place in the output. columns_to_places: chunks of all owners' columns, and where each
    lies in the output; after the first, where each is added."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, pooled = exchange, exchange.is_pooled
        of_rank = [[(s.embedding_dim // exchange.chunk, f) for s, f in o if f in pooled] for o in exchange.owned]
        self.own = [number for number, (_, f) in enumerate(exchange.owned[exchange.rank]) if f in pooled]
        self.own_widths = torch.tensor([width for width, _ in of_rank[exchange.rank]], dtype=torch.int64)
        features = [f for lookups in exchange.owned for _, f in lookups]
        numbers = zip(exchange.owners_order, features, strict=True)
        self.asked = [number for number, feature in numbers if feature in pooled]
        self.widths = torch.tensor([width for lookups in of_rank for width, _ in lookups], dtype=torch.int64)
        self.feature_K = torch.tensor([f for f in features if f in pooled], dtype=torch.int64)
        self.feature_K = self.feature_K.repeat_interleave(self.widths)
        self.of_rank = [sum(width for width, _ in lookups) for lookups in of_rank]
        self.place_K = torch.zeros(len(self.feature_K), dtype=torch.int64)
        base, _, column, place = exchange.where
        sums = exchange.sums
        turns = zip((base + column).split(sums), place.split(sums), strict=True) if sums else ()
        self.columns_to_places = list(turns)
        for columns, places in self.columns_to_places:
            self.place_K[columns] = places


def made_up_bags(exchange: Exchange, different_F: Sequence[int], size: int) -> FilledBags:
    """Returns the exchange of a batch of `size` samples a rank, with so many different ids of each feature, on every
    rank: for measuring what that takes."""
    rows_F = [feature.num_embeddings for feature in exchange.features.features]
    pairs = zip(different_F, rows_F, strict=True)
    ids = torch.cat([torch.arange(size) % different * rows // different for different, rows in pairs])
    lengths_FB = torch.ones(len(rows_F), size, dtype=torch.int32)
    none = torch.zeros(size, 0)
    sent, same = bags_once(Batch(none, lengths_FB, ids, none.sum(1), size, size), range(len(rows_F)))
    first, end = exchange.table_ranges[exchange.rank]
    lengths_LB = exchange.row_ranges.split(sent).lengths_TB[exchange.owners_order[first:end]]
    lengths_LWB = lengths_LB[:, None].expand(-1, exchange.world_size, -1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_LWB.reshape(-1).cumsum(0)])
    return FilledBags(Chunks(exchange), LocalIds(sent.values_N, offsets, size), sent, same)


class FilledBags:
    """The exchange of one batch's vectors and their gradients, with `Exchange`'s methods."""

    def __init__(self, chunks: Chunks, ids: LocalIds, sent: Batch, same: SameBags) -> None:
        """ids: those of this rank's tables. sent: what this rank has asked for; same: how its samples are in it."""
        self._exchange, self._size = exchange, size = chunks.exchange, ids.batch_size
        lengths_LWB = ids.offsets.diff().view(exchange.num_local, exchange.world_size, size)[chunks.own]
        filled_WKB = (lengths_LWB > 0).transpose(0, 1).repeat_interleave(chunks.own_widths, 1)
        self._leaving: list[int] = filled_WKB.sum((1, 2)).tolist()
        """Chunks for each rank."""
        rank, column, bag = filled_WKB.nonzero(as_tuple=True)
        self._places = (rank * size + bag) * filled_WKB.shape[1] + column
        """Their places among the chunks of [W * B, D_local]."""
        lengths_LB = exchange.row_ranges.split(sent).lengths_TB[chunks.asked]
        self._filled_KB = (lengths_LB > 0).repeat_interleave(chunks.widths, 0)
        self._arriving = [int(part.sum()) for part in self._filled_KB.split(chunks.of_rank)]
        """Chunks from each rank."""
        self._bag_KB, self._order_KB = same.bag_FB[chunks.feature_K], same.order_FB[chunks.feature_K]
        self._ordered_KB, self._chunks = same.ordered_FB[chunks.feature_K], chunks

    def send_pooled(self, local: Tensor) -> Pending:
        """local: [W * B, D_local] of this rank's tables."""
        wire, chunks = self._exchange.wires[0], local.detach().reshape(-1, self._exchange.chunk)
        size = wire.size(self._exchange.chunk)
        return self._send(wire.encode(chunks.index_select(0, self._places)), size, self._arriving, self._leaving)

    def in_output_order(self, arrived: Tensor, margin: Margin = (0, 0), into: Tensor | None = None) -> Tensor:
        """[B, margin + D + margin] float32, as `Exchange.in_output_order` gives it; empty bags are zero."""
        e = self._exchange
        if e.ends_inside_a_chunk(margin):
            return with_margin(self.in_output_order(arrived), margin, into)
        vectors = e.wires[0].decode(arrived).view(-1, e.chunk)
        nothing = len(vectors)
        vectors = torch.cat([vectors, vectors.new_zeros(1, e.chunk)])
        filled = self._filled_KB.view(-1)
        numbers_KB = torch.where(filled, filled.cumsum(0) - 1, nothing).view_as(self._filled_KB)
        sources_KB = numbers_KB.gather(1, self._bag_KB)
        before, after = (columns // e.chunk for columns in margin)
        index = torch.full((self._size, before + e.width + after), nothing, dtype=torch.int64)
        for columns, places in self._chunks.columns_to_places[:1]:
            index[:, before + places] = sources_KB[columns].T
        output = vectors.index_select(0, index.view(-1)).view(self._size, -1, e.chunk)
        for columns, places in self._chunks.columns_to_places[1:]:  # the parts of rows, in turn
            output[:, before + places] += vectors[sources_KB[columns].T]
        found = output.view(self._size, -1)
        return found if into is None else into.copy_(found)

    def send_gradients(self, gradient_BD: Tensor, margin: Margin = (0, 0)) -> Pending:
        """Gradients of the output, to the owners: one a filled bag."""
        e = self._exchange
        if e.ends_inside_a_chunk(margin):
            gradient_BD, margin = without_margin(gradient_BD, margin), (0, 0)
        chunks, before = gradient_BD.reshape(-1, e.chunk), margin[0] // e.chunk
        index_KB = self._order_KB * (gradient_BD.shape[1] // e.chunk) + before + self._chunks.place_K[:, None]
        first_KB = torch.ones(index_KB.shape, dtype=torch.bool)
        torch.ne(self._ordered_KB[:, 1:], self._ordered_KB[:, :-1], out=first_KB[:, 1:])
        kept_KB = self._filled_KB.gather(1, self._ordered_KB)
        starts = first_KB[kept_KB].nonzero().view(-1)
        summed = torch.nn.functional.embedding_bag(index_KB[kept_KB], chunks, starts, mode="sum")
        wire = e.wires[1]
        sent = wire.encode(summed, shares=self._size * e.world_size)
        return self._send(sent, wire.size(e.chunk), self._leaving, self._arriving)

    def as_gradient(self, arrived: Tensor) -> Tensor:
        """[W * B, D_local] float32, from what `send_gradients` brought; zero for empty bags."""
        e, bags = self._exchange, self._size * self._exchange.world_size
        found = e.wires[1].decode(arrived, shares=bags).view(-1, e.chunk)
        chunks = found.new_zeros(bags * e.local_dim // e.chunk, e.chunk)
        return chunks.index_copy_(0, self._places, found).view(bags, e.local_dim)

    def _send(self, sent: Tensor, chunk: int, arriving: list[int], leaving: list[int]) -> Pending:
        """chunk: elements of one on the wire."""
        coming, going = ([chunk * count for count in counts] for counts in (arriving, leaving))
        return self._exchange.all_to_all("vectors", self._exchange.empty(sent, sum(coming)), sent, coming, going)
