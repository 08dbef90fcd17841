"""A move in which something fails on one rank: said on every rank at once; what it has lost is not used in silence."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.moves.reshard import ReshardError, ReshardRefused
from dlrm_autoshard.distributed.tables.optimizers import Adagrad
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks

TABLES = (TableConfig("a", 2_000_000, 16), TableConfig("b", 1000, 8), TableConfig("c", 1000, 8))
HOME, AWAY = ShardingPlan({"a": 0, "b": 1, "c": 0}, 2), ShardingPlan({"a": 1, "b": 0, "c": 0}, 2)
IDS = torch.ones(3, 4, dtype=torch.int32), torch.arange(12)


def failing(how: str, storage: Any) -> None:
    """At the second use of what `how` names; `hold` at the first."""
    real, left = getattr(storage, how), 0 if how == "hold" else 1

    def fails(*given: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError("no memory left")
        return real(*given, **named)

    setattr(storage, how, fails)


def move_that_fails(rank: int, world_size: int, how: str, at: int) -> list[str]:
    bags = ShardedEmbeddingBags(TABLES, optimizer=Adagrad(lr=0.1), plan=HOME)
    bags(*IDS).sum().backward()
    if rank == at:
        failing(how, bags.sharded.storage)
    with pytest.raises(ReshardError) as broken:
        bags.move_to(AWAY)
    said = [str(broken.value)]
    uses: list[Callable[[], object]] = [
        lambda: bags(*IDS),
        bags.state_dict,
        bags.own_tensors,
        lambda: bags.move_to(HOME),
        lambda: setattr(bags, "table_lr", 1.0),
    ]
    for use in uses:
        with pytest.raises(UserError) as refused:
            use()
        said.append(str(refused.value))
    return said


@pytest.mark.parametrize("how", ["release_part", "hold"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_move_that_fails_on_one_rank_is_told_on_all_and_the_tables_refuse_use(how: str, at: int) -> None:
    for broken, *refused in run_ranks(move_that_fails, 2, how, at, timeout=20):
        assert f"rank {at} failed while" in broken and "MemoryError: no memory left" in broken
        assert all("tables were lost when a move broke off" in text for text in refused), refused


def move_that_cannot_begin(rank: int, world_size: int) -> str:
    bags = ShardedEmbeddingBags(TABLES, optimizer=Adagrad(lr=0.1), plan=HOME)
    before = bags(*IDS).detach()
    claim = bags.sharded.storage.claim
    if rank == 1:
        bags.sharded.storage.claim = lambda names: (_ for _ in ()).throw(MemoryError())  # type: ignore[method-assign]
    with pytest.raises(ReshardRefused) as refused:
        bags.move_to(AWAY)
    bags.sharded.storage.claim = claim  # type: ignore[method-assign]
    bags.move_to(AWAY)
    assert torch.equal(bags(*IDS).detach(), before)
    return str(refused.value)


def test_a_move_that_cannot_begin_on_one_rank_is_refused_on_all() -> None:
    assert run_ranks(move_that_cannot_begin, 2, timeout=20) == ["rank 1: MemoryError"] * 2


def read_in_a_fork(rank: int, world_size: int) -> tuple[int, str]:
    """(how the child ended, what it was told)"""
    bags = ShardedEmbeddingBags(TABLES, optimizer=Adagrad(lr=0.1))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            bags.state_dict()
        except UserError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    os.close(writer)
    return status, os.read(reader, 1000).decode()


def test_a_forked_process_that_reads_the_tables_is_told_where_they_are() -> None:
    [(status, said)] = run_ranks(read_in_a_fork, 1)
    assert status == 0 and "is a fork of process" in said
