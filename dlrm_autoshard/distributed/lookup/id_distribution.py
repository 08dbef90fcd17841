"""One batch's ids on their way to the tables' owners: lengths first, then ids, whose number the lengths tell.

ids = IdDistribution(exchange, batch)        # lengths are on their way
ids.send_values()                            # so are the ids; may be left to `finish`
local = ids.finish()                         # LocalIds: this rank's tables, the whole global batch
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.exchange import Exchange, Pending
from dlrm_autoshard.distributed.lookup.note import NOTE, agreed, note_of

# Ids are copied by table (a table's ids lie side by side), from the batch straight to where they are sent from, and
# from where they arrive straight into the owner's order. Axes: T tables, B samples a rank, W ranks, N ids.


@dataclass(frozen=True)
class LocalIds:
    """Ids of the shards this rank owns, for the whole global batch, as fbgemm takes them: table-major bags."""

    values_N: Tensor
    offsets: Tensor  # [T_local * W * B + 1]
    batch_size: int  # B, of one rank
    weights_N: Tensor | None = None


class IdDistribution:
    def __init__(self, exchange: Exchange, batch: Batch) -> None:
        self._exchange, self._batch_size = exchange, batch.padded_size
        e = exchange
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
        self._lengths_pending = e.send_lengths(self._lengths, self._batch_size, note_of(batch, self._lengths))
        self._values_pending: Pending | None = None
        self._weights_pending: Pending | None = None

    def send_values(self) -> None:
        e = self._exchange
        if e.world_size == 1:
            return
        arrived = self._lengths_pending.wait().view(e.world_size, -1)
        self._values = agreed(arrived, self._values)
        self._received_lengths = arrived[:, NOTE:].view(e.world_size, e.num_local, self._batch_size)
        self._arriving: list[list[int]] = self._received_lengths.sum(2).tolist()
        self._values_pending = self._send("values", self._values)
        if self._weights is not None:
            self._weights_pending = self._send("weights", self._weights)

    def finish(self) -> LocalIds:
        e = self._exchange
        lengths, values, weights = self._lengths, self._values, self._weights
        if e.world_size > 1:
            if self._values_pending is None:
                self.send_values()
            assert self._values_pending is not None
            values = self._table_major(self._values_pending.wait())
            if self._weights_pending is not None:
                weights = self._table_major(self._weights_pending.wait())
            lengths = self._received_lengths.transpose(0, 1)
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.reshape(-1).to(values.dtype))
        return LocalIds(values, offsets, self._batch_size, weights)

    def _send(self, channel: str, of_ids_N: Tensor) -> Pending:
        """One number an id, to the owners of the ids' tables."""
        e = self._exchange
        by_table = of_ids_N.split(self._counts)
        sent = [[by_table[i] for i in e.owners_order[first:end]] for first, end in e.table_ranges]
        splits = [sum(counts) for counts in self._arriving]
        return e.all_to_all(
            channel,
            of_ids_N.new_empty(sum(splits)),
            lambda rank, into: torch.cat(sent[rank], out=into),
            splits,
            [sum(len(part) for part in parts) for parts in sent],
        )

    def _table_major(self, arrived_N: Tensor) -> Tensor:
        """From rank-major, as it arrived."""
        tables = self._exchange.num_local
        if not tables:
            return arrived_N
        parts = arrived_N.split([count for counts in self._arriving for count in counts])
        return torch.cat([part for table in range(tables) for part in parts[table::tables]])
