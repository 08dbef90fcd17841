"""Ranks of a custom loop that do not do the same in a step: each is told which rank does what, and none waits."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.tables.optimizers import SGD
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks

TABLES = tuple(TableConfig(name, 50, 8) for name in "abc")
LIMIT = 20.0  # seconds: far less than the ranks' timeout, which is what they would wait for


def made(by_tcp: bool = False, **settings: Any) -> ShardedEmbeddingBags:
    bags = ShardedEmbeddingBags(TABLES, optimizer=SGD(lr=1.0), **settings)
    if by_tcp:  # as between hosts
        bags.sharded._link = None
        bags.sharded.adopt(bags.plan)
    return bags


def ids_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (len(TABLES), 6), generator=generator)
    return lengths, torch.randint(0, 50, (int(lengths.sum()),), generator=generator)


def weights_on_one(rank: int, world_size: int, by_tcp: bool) -> str:
    bags, (lengths, values) = made(by_tcp), ids_of(rank, 0)
    with pytest.raises(UserError) as caught:
        bags(lengths, values, torch.ones(len(values)) if rank == 1 else None)
    return str(caught.value)


@pytest.mark.parametrize("by_tcp", [False, True])
def test_weights_on_one_rank_only_are_said_on_all(by_tcp: bool) -> None:
    for said in run_ranks(weights_on_one, 3, by_tcp, timeout=LIMIT):
        assert "rank 1 looks up ids with weights, but rank 0 without" in said


def one_leaves_a_backward_pass_out(rank: int, world_size: int, ahead: bool) -> str:
    bags = made()
    batches = bags.ahead(range(6), lambda step: ids_of(rank, step))
    with pytest.raises(UserError) as caught:
        for step in range(5):
            pooled = bags(next(batches)[1]) if ahead else bags(*ids_of(rank, step))
            if not (rank == 1 and step == 2):
                pooled.sum().backward()
    time.sleep(1)  # else the others might hear of its end
    return str(caught.value)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_rank_that_leaves_a_backward_pass_out_is_named_at_once_on_all(ahead: bool) -> None:
    said = run_ranks(one_leaves_a_backward_pass_out, 2, ahead, timeout=LIMIT)
    assert all("all or none of them call backward() after each" in text for text in said), said
    seen = (
        "rank 1 looks a batch up, but rank 0 waits for its vectors",
        "rank 0 is in a lookup or a backward pass that rank 1",
    )
    assert all(any(one in text for one in seen) for text in said)


def all_leave_it_out(rank: int, world_size: int) -> bool:
    bags = made()
    for step in range(5):
        pooled = bags(*ids_of(rank, step))
        if step != 2:
            pooled.sum().backward()
    return bool(pooled.isfinite().all())


def test_a_backward_pass_that_all_leave_out_is_nobodys_mistake() -> None:
    assert run_ranks(all_leave_it_out, 2) == [True, True]


def ids_of_other_types(rank: int, world_size: int, by_tcp: bool) -> list[bool]:
    bags, found = made(by_tcp), []
    lengths, values = ids_of(rank, 0)
    for ours in (torch.int32, torch.int64):
        with torch.no_grad():
            other = torch.int32 if ours == torch.int64 else torch.int64
            found.append(bags(lengths, values.to(ours if rank == 0 else other)))
            found.append(bags(lengths, values))
    return [torch.equal(pooled, found[1]) for pooled in found]


@pytest.mark.parametrize("by_tcp", [False, True])
def test_ids_may_be_of_other_types_on_other_ranks(by_tcp: bool) -> None:
    assert run_ranks(ids_of_other_types, 2, by_tcp, timeout=LIMIT) == [[True] * 4] * 2


def update_of(rank: int, world_size: int, how: str, dtype: str) -> Tensor:
    """Of a row of table `a`, whose gradient is too small for fp16, and whose neighbour's is too large."""
    a, b = TableConfig("a", 5, 8), TableConfig("b", 5, 8)
    plan = {"split": {"a[0:4]": 0, "a[4:8]": 0, "b": 0}, "shared": {"a": 0, "b": 0}}[how]
    features = {"a": ["first", "second"]} if how == "shared" else None
    bags = ShardedEmbeddingBags(
        [a, b], optimizer=SGD(lr=1.0), plan=ShardingPlan(plan, 1), exchange_dtype=dtype, features=features
    )
    for value in bags.own_tensors().values():
        value.zero_()
    count = 3 if how == "shared" else 2
    pooled = bags(torch.ones(count, 2, dtype=torch.int32), torch.tensor([0, 1] * count))
    pooled.backward(torch.tensor([2.5e-9, 1e6])[:, None].expand_as(pooled))
    return torch.cat([value for name, value in bags.own_tensors().items() if name.startswith("a")], 1)[:2, :4].clone()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("how", ["split", "shared"])
def test_one_rank_rounds_nothing_for_nothing_travels(how: str, dtype: str) -> None:
    [found], [expected] = (run_ranks(update_of, 1, how, one) for one in (dtype, "fp32"))
    assert torch.equal(found, expected) and bool((found[0] != 0).all()) and bool(found.isfinite().all())
