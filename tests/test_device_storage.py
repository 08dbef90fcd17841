"""Tables on a device, an allocation each: a move copies what moves, and memory never holds more than it must.

The device is a stand-in: host memory that is handed out table by table, and counted while it is alive.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_autoshard.config import TableOptimizerConfig, TablesConfig
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.moves.reshard import ReshardRefused, reshard
from dlrm_autoshard.distributed.ranks.groups import new_group
from dlrm_autoshard.distributed.tables.storage import Storage
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks
from tests.small_embeddings import TABLES, global_batch

CPU = torch.device("cpu")


class CountedMemory:
    """Allocates, and knows how many bytes are alive and were alive at most."""

    def __init__(self) -> None:
        self.alive = self.most = self.taken = 0

    def __call__(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.full((numel,), float("nan"), dtype=dtype)  # nobody may count on what is in it
        self.taken += tensor.nbytes
        self.alive += tensor.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor.untyped_storage(), self._freed, tensor.nbytes)
        return tensor

    def _freed(self, size: int) -> None:
        self.alive -= size


def make(
    rank: int, plan: ShardingPlan, tables: list[TableConfig], optimizer: str, memory: CountedMemory | None
) -> ShardedEmbeddings:
    config = TablesConfig(optimizer=TableOptimizerConfig(name=optimizer, lr=0.1))
    storage = None if memory is None else Storage(tables, config, CPU, memory)
    group = dist.group.WORLD
    assert group is not None
    return ShardedEmbeddings(
        tables, plan, config, rank=rank, group=group, id_group=new_group(), device=CPU, storage=storage
    )


def train_with_moves(rank: int, world_size: int, optimizer: str, on_device: bool) -> dict[str, torch.Tensor]:
    def placed(owners: str) -> ShardingPlan:
        return ShardingPlan({t.name: int(r) for t, r in zip(TABLES, owners, strict=True)}, world_size)

    memory = CountedMemory() if on_device else None
    embeddings = make(rank, placed("0011"), TABLES, optimizer, memory)
    for step in range(8):
        if step in (2, 3, 5, 6):
            plan = placed({2: "1100", 3: "1111", 5: "0000", 6: "0110"}[step])
            reshard(embeddings, plan, group=dist.group.WORLD, chunk_bytes=4096, checksums=True)  # type: ignore[arg-type]
        local = embeddings.lookup(embeddings.distribute(global_batch(step, world_size)[rank]).finish())
        pooled = embeddings.exchange.in_output_order(embeddings.exchange.send_pooled(local).wait())
        embeddings.update(local, embeddings.exchange.send_gradients(torch.sin(pooled) / 10).wait())
    if memory is not None:
        assert memory.alive == embeddings.storage.bytes_of(embeddings.plan.shards_on(rank))["device"]
    return {
        f"{name}.{key}": value.detach().clone()
        for name in embeddings.plan.shards_on(rank)
        for key, value in embeddings.storage.tensors(name).items()
    }


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])  # on CPU Adagrad wants weight and state side by side
def test_device_memory_trains_and_moves_to_the_same_bits(optimizer: str) -> None:
    for on_host, on_device in zip(
        run_ranks(train_with_moves, 2, optimizer, False), run_ranks(train_with_moves, 2, optimizer, True), strict=True
    ):
        assert on_host.keys() == on_device.keys()
        assert all(torch.equal(value, on_device[key]) for key, value in on_host.items())


BIG = [TableConfig(f"t{i}", 1000 + i, 64) for i in range(6)]
BYTES = {t.name: t.weight_bytes for t in BIG}


def swap_two(rank: int, world_size: int, free_bytes: int | None) -> tuple[Any, ...]:
    """Rank 0 has t0 to t2, rank 1 the others; t0 and t3 change places."""
    home = {t.name: int(i >= 3) for i, t in enumerate(BIG)}
    memory = CountedMemory()
    embeddings = make(rank, ShardingPlan(home, world_size), BIG, "sgd", memory)
    stays = embeddings.plan.shards_on(rank)[1]
    address, values = embeddings.storage.tensors(stays)["weight"].data_ptr(), memory.taken
    held, memory.most = memory.alive, memory.alive
    expected = {n: embeddings.storage.tensors(n)["weight"].sum() for n in embeddings.plan.shards_on(rank)}
    swapped = ShardingPlan(home | {"t0": 1, "t3": 0}, world_size)
    stats = reshard(embeddings, swapped, group=dist.group.WORLD, free_bytes=free_bytes)  # type: ignore[arg-type]
    after = {n: embeddings.storage.tensors(n)["weight"].sum() for n in embeddings.plan.shards_on(rank)}
    assert all(torch.equal(after[n], expected[n]) for n in after.keys() & expected.keys())
    moved_in = embeddings.storage.tensors(stays)["weight"].data_ptr() != address
    return held, memory.most - held, memory.alive - held, memory.taken - values, moved_in, stats.bytes


def test_what_stays_is_not_touched_and_only_what_arrives_is_allocated() -> None:
    for rank, (_, beyond, growth, taken, moved, travelled) in enumerate(run_ranks(swap_two, 2, None)):
        arriving, leaving = (BYTES["t3"], BYTES["t0"])[:: 1 - 2 * rank]
        assert not moved
        assert taken == beyond == arriving  # not both layouts, and no copy of what is held
        assert growth == arriving - leaving
        assert travelled == BYTES["t0"] + BYTES["t3"]


def test_a_device_without_memory_for_both_lets_go_first() -> None:
    """Free for nothing but the difference: departing tables wait in host memory."""
    growth = BYTES["t3"] - BYTES["t0"]
    for rank, (_, beyond, grown, taken, moved, _) in enumerate(run_ranks(swap_two, 2, growth)):
        assert beyond == max(0, grown) == max(0, (1 - 2 * rank) * growth)
        assert taken == BYTES["t3" if rank == 0 else "t0"]
        assert not moved


def gather_where_it_cannot_fit(rank: int, world_size: int) -> str:
    home = {t.name: int(i >= 3) for i, t in enumerate(BIG)}
    embeddings = make(rank, ShardingPlan(home, world_size), BIG, "sgd", CountedMemory())
    with pytest.raises(ReshardRefused) as refused:
        plan = ShardingPlan(dict.fromkeys(home, 1), world_size)
        reshard(embeddings, plan, group=dist.group.WORLD, free_bytes=1000)  # type: ignore[arg-type]
    embeddings.lookup(embeddings.distribute(batch_of(BIG)).finish())  # training goes on
    return str(refused.value)


def batch_of(tables: list[TableConfig]) -> Any:
    from dlrm_autoshard.data.batch import Batch

    ones = torch.ones(len(tables), 4, dtype=torch.int32)
    return Batch(torch.zeros(4, 0), ones, torch.arange(4 * len(tables), dtype=torch.int32), torch.zeros(4), 4, 8)


def test_a_device_that_cannot_hold_the_new_layout_is_named() -> None:
    first, second = run_ranks(gather_where_it_cannot_fit, 2)
    assert first == second
    assert "rank 1 needs" in first and "the device of rank 1 has" in first


def count_flushes(rank: int, world_size: int) -> list[int]:
    names = [t.shard for t in TABLES]
    plan = ShardingPlan({name: 0 for name in names}, 1)
    embeddings = make(rank, plan, TABLES, "rowwise_adagrad", CountedMemory())
    lookup, flushes, counts = embeddings.storage.lookups[0].tbe, 0, list[int]()

    def flush() -> None:
        nonlocal flushes
        flushes += 1

    lookup.flush = flush
    for _ in range(2):
        embeddings.lookup(embeddings.distribute(global_batch(0, 1)[0]).finish())
        for _ in range(2):  # as a checkpoint does: checked, then saved
            for name in names:
                embeddings.storage.tensors(name)
        counts.append(flushes)
    return counts


def test_a_checkpoint_flushes_the_cache_once() -> None:
    assert run_ranks(count_flushes, 1) == [[1, 2]]


MANY = [TableConfig("small", 1024, 64), *(TableConfig(f"t{i}", 16_384, 64) for i in range(64))]


def bytes_for_a_small_move(rank: int, world_size: int) -> int:
    home = ShardingPlan({t.name: 0 for t in MANY}, world_size)
    memory = CountedMemory()
    embeddings = make(rank, home, MANY, "sgd", memory)
    before = memory.taken
    reshard(embeddings, ShardingPlan({**home.rank_of, "small": 1}, 2), group=dist.group.WORLD)  # type: ignore[arg-type]
    return memory.taken - before


def test_moving_one_small_table_copies_one_small_table() -> None:
    assert run_ranks(bytes_for_a_small_move, 2) == [0, MANY[0].weight_bytes]
