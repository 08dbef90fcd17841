"""Does the work of id_distribution.py on a GPU, where the host never waits for the device.

The host counts ids per owner before the batch is copied and sends the counts by gloo, so every size is known when its
transfer is queued. Axes: T tables, B samples per rank, W ranks, N ids.
"""

from __future__ import annotations

import torch

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.device import SideStreams
from dlrm_autoshard.distributed.lookup.exchange import Exchange, Pending
from dlrm_autoshard.distributed.lookup.id_distribution import LocalIds
from dlrm_autoshard.distributed.lookup.note import NOTE, agreed, note_of


class DeviceIdDistribution:
    """Sends a batch's ids from a GPU. batch: lengths_TB and values_N in host memory (a device's lengths are read
    back)."""

    def __init__(self, exchange: Exchange, batch: Batch, streams: SideStreams) -> None:
        self._exchange, self._streams, self._batch_size = exchange, streams, batch.padded_size
        e, batch = exchange, exchange.row_ranges.split(batch)
        self._lengths, self._values = streams.copy(batch.lengths_TB), streams.copy(batch.values_N)
        self._weights = None if batch.weights_N is None else streams.copy(batch.weights_N)
        self._values_pending: Pending | None = None
        self._weights_pending: Pending | None = None
        if e.world_size > 1:
            counts_T = batch.lengths_TB.cpu().sum(1)[e.owners_order]
            self._leaving = [int(counts_T[first:end].sum()) for first, end in e.table_ranges]
            self._counting = e.send_lengths(counts_T, 1, note_of(batch, counts_T))  # host tensors, by gloo
        with streams.travel():
            if e.send_order is not None:
                self._lengths, self._values, self._weights = torch.ops.fbgemm.permute_2D_sparse_data(
                    e.send_order, self._lengths, self._values, self._weights, e.ids_sent(batch)
                )
            if e.world_size > 1:
                self._lengths_pending = e.send_lengths(self._lengths, self._batch_size)

    def send_values(self) -> None:
        """Sends the ids; waits for the other hosts' counts, but for no device."""
        e = self._exchange
        if e.world_size == 1:
            return
        arrived = self._counting.wait().view(e.world_size, -1)
        arriving = arrived[:, NOTE:].sum(1).tolist()
        with self._streams.travel():
            self._values = agreed(arrived, self._values)
            received = self._values.new_empty(sum(arriving))
            self._values_pending = e.all_to_all("values", received, self._values, arriving, self._leaving)
            if self._weights is not None:
                received = self._weights.new_empty(sum(arriving))
                self._weights_pending = e.all_to_all("weights", received, self._weights, arriving, self._leaving)

    def finish(self) -> LocalIds:
        e, lengths, values, weights = self._exchange, self._lengths, self._values, self._weights
        if e.world_size > 1 and self._values_pending is None:
            self.send_values()
        with self._streams.travel():
            if self._values_pending is not None:
                lengths = self._lengths_pending.wait().view(-1, self._batch_size)
                values = self._values_pending.wait()
                weights = None if self._weights_pending is None else self._weights_pending.wait()
                if e.num_local:  # from rank-major to table-major
                    lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(
                        e.table_major, lengths, values, weights, values.numel()
                    )
            offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.reshape(-1).to(values.dtype))
        self._streams.join(values, offsets, *(() if weights is None else (weights,)))
        return LocalIds(values, offsets, self._batch_size, weights)
