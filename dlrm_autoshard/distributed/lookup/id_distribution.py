"""Sends one batch's ids to the tables' owners: lengths first, which give the number of ids.

ids = IdDistribution(exchange, batch)        # sends lengths
ids.send_values()                            # sends ids; `finish` does it otherwise
local = ids.finish()                         # LocalIds: this rank's tables, the whole global batch
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.exchange import Exchange, Pending
from dlrm_autoshard.distributed.lookup.id_messages import send_ids, table_major
from dlrm_autoshard.distributed.lookup.note import NOTE, agreed, all_pack, note_of

# Axes: T tables, B samples per rank, W ranks, N ids.


@dataclass(frozen=True)
class LocalIds:
    """Ids of this rank's shards for the whole global batch, in fbgemm's layout: table-major bags."""

    values_N: Tensor
    offsets: Tensor  # [T_local * W * B + 1]
    batch_size: int  # B, per rank
    weights_N: Tensor | None = None


class IdDistribution:
    """Sends one batch's ids to their tables' owners."""

    def __init__(self, exchange: Exchange, batch: Batch) -> None:
        self._exchange, self._batch_size = exchange, batch.padded_size
        e, batch = exchange, exchange.row_ranges.split(batch)
        self._lengths, self._values, self._weights = batch.lengths_TB, batch.values_N, batch.weights_N
        if e.world_size == 1:
            if e.send_order is not None:
                self._lengths, self._values, self._weights = torch.ops.fbgemm.permute_2D_sparse_data(
                    e.send_order, batch.lengths_TB, batch.values_N, batch.weights_N, e.ids_sent(batch)
                )
            return
        self._counts: list[int] = batch.lengths_TB.sum(1).tolist()
        if e.send_order is not None:
            self._lengths = batch.lengths_TB.index_select(0, e.send_order)
        self._packing = e.packing
        fits = self._packing is not None and self._packing.fits(batch, self._counts)
        note, lengths = note_of(batch, self._lengths, packs=fits), self._lengths
        if self._packing is not None:
            note, lengths = note.view(torch.uint8), lengths.to(torch.uint8)
        self._lengths_pending = e.send_lengths(lengths, self._batch_size, note)
        self._values_pending: Pending | None = None
        self._weights_pending: Pending | None = None

    def send_values(self) -> None:
        e = self._exchange
        if e.world_size == 1:
            return
        arrived = self._lengths_pending.wait().view(e.world_size, -1)
        note = NOTE * self._lengths.element_size() // arrived.element_size()
        notes, lengths = arrived[:, :note].contiguous().view(self._lengths.dtype), arrived[:, note:]
        self._values = agreed(notes, self._values)
        if self._packing is not None and not all_pack(notes):
            self._packing, lengths = None, e.send_lengths(self._lengths, self._batch_size).wait()
        self._received_lengths = lengths.view(e.world_size, e.num_local, self._batch_size)
        self._arriving: list[list[int]] = self._received_lengths.sum(2).tolist()
        self._values_pending = send_ids(e, "values", self._values, self._counts, self._arriving, self._packing)
        if self._weights is not None:
            self._weights_pending = send_ids(e, "weights", self._weights, self._counts, self._arriving)

    def finish(self) -> LocalIds:
        e = self._exchange
        lengths, values, weights = self._lengths, self._values, self._weights
        if e.world_size > 1:
            if self._values_pending is None:
                self.send_values()
            assert self._values_pending is not None
            values = table_major(e, self._values_pending.wait(), self._arriving, self._packing, self._values.dtype)
            if self._weights_pending is not None:
                weights = table_major(e, self._weights_pending.wait(), self._arriving)
            lengths = self._received_lengths.transpose(0, 1)
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.reshape(-1).to(values.dtype))
        return LocalIds(values, offsets, self._batch_size, weights)
