"""Ids and lengths in few bytes between hosts: the owners get the same ones as through shared memory, to the bit."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dlrm_autoshard.config import TableOptimizerConfig, TablesConfig
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.packed_ids import IdPacking
from dlrm_autoshard.distributed.ranks.groups import new_group
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks
from tests.small_embeddings import global_batch, world

TABLES = [TableConfig("a", 200, 8), TableConfig("b", 60_000, 4), TableConfig("c", 70_000, 16), TableConfig("d", 7, 8)]


@given(rows=st.lists(st.integers(1, 2**31), min_size=1, max_size=6), wide=st.booleans(), data=st.data())
def test_what_is_packed_is_unpacked(rows: list[int], wide: bool, data: st.DataObject) -> None:
    tables = [TableConfig(f"t{i}", number, 4) for i, number in enumerate(rows)]
    packing, dtype = IdPacking.of(tables), torch.int64 if wide else torch.int32
    if packing is None:
        return
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    bags = [data.draw(st.lists(st.integers(0, rows[i] - 1), max_size=5)) for i in order]
    counts, ids = [*map(len, bags)], torch.tensor([id for bag in bags for id in bag], dtype=dtype)
    packed = torch.cat([ids.new_empty(0, dtype=torch.uint8), *packing.pack(ids.split(counts), order)])
    assert len(packed) == packing.bytes_of(order, counts) <= ids.nbytes
    assert torch.equal(packing.unpack(packed, order, counts, dtype), ids)


def batches(kind: str, world_size: int) -> list[Batch]:
    made = global_batch(1, world_size, TABLES)
    last = made[-1]
    if kind == "int64 on one rank":
        made[-1] = replace(last, values_N=last.values_N.long())
    elif kind == "a bag of 300":
        longer = last.lengths_TB.clone()
        longer[3, 0] += 300
        made[-1] = replace(last, lengths_TB=longer, values_N=torch.cat([last.values_N, last.values_N.new_ones(300)]))
    elif kind != "int32":  # an id that its table's rows do not need so many bytes for
        values = last.values_N.clone()
        values[-1] = int(kind)
        made[-1] = replace(last, values_N=values)
    return made


def arrived(rank: int, world_size: int, kind: str) -> list[tuple[Tensor, Tensor, int]]:
    """Ids and offsets at this rank, and bytes that it sent: through shared memory, then by the group."""
    found, plan = [], ShardingPlan({"a": 1, "b": 0, "c[0:8]": 0, "c[8:16]": 1, "d": 0}, world_size)
    config = TablesConfig(optimizer=TableOptimizerConfig(name="sgd"))
    for shared in (True, False):
        with patch(f"{ShardedEmbeddings.__module__}.mb_per_s", lambda group: 50.0):  # a slow network
            embeddings = ShardedEmbeddings(
                TABLES, plan, config, rank=rank, group=world(), id_group=new_group(), device=torch.device("cpu"),
                shared_memory=shared,
            )  # fmt: skip
        exchange = embeddings.exchange
        with patch.object(exchange, "all_to_all", wraps=exchange.all_to_all) as through:
            ids = embeddings.distribute(batches(kind, world_size)[rank]).finish()
        sent = sum(sum(leaving) * received.element_size() for (_, received, _, _, leaving), _ in through.call_args_list)
        found.append((ids.values_N, ids.offsets, sent))
    return found


@pytest.mark.parametrize("kind", ["int32", "int64 on one rank", "a bag of 300", "-1", "70000"])
def test_the_owners_get_the_same_ids_in_fewer_bytes(kind: str) -> None:
    for (values, offsets, sent), (other_values, other_offsets, other_sent) in run_ranks(arrived, 2, kind):
        assert values.dtype == other_values.dtype and torch.equal(values, other_values)
        assert torch.equal(offsets, other_offsets)
        fits = kind.startswith("int")
        assert other_sent < (0.55 if fits else 1.3) * sent
