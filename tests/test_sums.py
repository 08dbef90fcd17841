"""Sums over ranks of several hosts: right, the same bits on every rank, and fewer bytes between the hosts."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.distributed.lookup import shared_memory
from dlrm_autoshard.distributed.sums import SumsByHost, sums_over
from tests.ranks import run_ranks
from tests.small_embeddings import world

CPU = torch.device("cpu")


def summed(rank: int, world_size: int, hosts: str, as_hosts: bool) -> list[Tensor]:
    """What ranks of these hosts have after sums of several sizes, some started before others are waited for."""
    own = shared_memory.host_id() + hosts[rank]
    with patch.object(shared_memory, "host_id", lambda: own), patch(f"{sums_over.__module__}.host_id", lambda: own):
        start = sums_over(world(), CPU, shared_memory=True)
    assert isinstance(start, SumsByHost) == as_hosts
    generator = torch.Generator().manual_seed(rank)
    found = []
    for size in (1001, 2, 0, 70_001):
        whole = torch.randint(-99, 99, (size,), generator=generator).float()
        parts = torch.randn(size, generator=generator)
        expected = whole.clone()
        dist.all_reduce(expected)
        first, second = start(whole), start(parts)
        assert torch.equal(second.wait(), parts) and torch.equal(first.wait(), expected)
        found.append(parts)
    return found


@pytest.mark.parametrize(("hosts", "as_hosts"), [("0011", True), ("0101", True), ("001122", True), ("001", False)])
def test_every_rank_gets_the_same_sums(hosts: str, as_hosts: bool) -> None:
    first, *others = run_ranks(summed, len(hosts), hosts, as_hosts)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
