"""Sends ids to their tables' owners and puts arriving ones in lookup order.

pending = send_ids(exchange, "values", values_N, counts, arriving, packing)      # packing: into fewer bytes
values_N = table_major(exchange, pending.wait(), arriving, packing, torch.int32)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_autoshard.distributed.lookup.exchange import Exchange, Pending
from dlrm_autoshard.distributed.lookup.packed_ids import IdPacking

# Ids are copied by table (a table's ids are contiguous), from the batch straight to the send buffer, and from the
# receive buffer straight into the owner's order.


def send_ids(
    exchange: Exchange,
    channel: str,
    of_ids_N: Tensor,
    counts: Sequence[int],
    arriving: Sequence[Sequence[int]],
    packing: IdPacking | None = None,
) -> Pending:
    """Sends a number per id to the owners of the ids' tables. counts: ids of each feature; arriving: ids from each rank
    for each of this rank's lookups."""
    by_table = of_ids_N.split(list(counts))
    features = [exchange.owners_order[first:end] for first, end in exchange.table_ranges]
    sent = [[by_table[i] for i in own] for own in features]
    splits = [sum(each) for each in arriving]
    if packing is not None:
        sent = [packing.pack(parts, own) for parts, own in zip(sent, features, strict=True)]
        splits = [packing.bytes_of(features[exchange.rank], each) for each in arriving]
    return exchange.all_to_all(
        channel,
        of_ids_N.new_empty(sum(splits), dtype=of_ids_N.dtype if packing is None else torch.uint8),
        lambda rank, into: torch.cat(sent[rank], out=into),
        splits,
        [sum(len(part) for part in parts) for parts in sent],
    )


def table_major(
    exchange: Exchange,
    arrived: Tensor,
    arriving: Sequence[Sequence[int]],
    packing: IdPacking | None = None,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Turns the rank-major arrivals of `send_ids` into the lookups' order. dtype: of the ids."""
    lookups, counts = exchange.num_local, [count for each in arriving for count in each]
    if packing is not None:
        first, end = exchange.table_ranges[exchange.rank]
        features = exchange.owners_order[first:end] * exchange.world_size
        arrived = packing.unpack(arrived, features, counts, dtype)
    parts = arrived.split(counts)
    return torch.cat([part for lookup in range(lookups) for part in parts[lookup::lookups]]) if lookups else arrived
