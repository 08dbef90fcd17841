"""The helper that runs distributed tests: results by rank, and bad ends that name the rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from dlrm_autoshard.config import RunConfig
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.errors import UserError
from tests.ranks import RankError, run_ranks


def total(rank: int, world_size: int, offset: int) -> tuple[int, int, int]:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return rank, int(value), torch.get_num_threads()


def raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("one is not well")
    dist.barrier()


def die_on_two(rank: int, world_size: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def die_after_the_other_raised(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ValueError("nobody answers")
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def _affinity(rank: int, world_size: int) -> set[int]:
    return os.sched_getaffinity(0)


def test_results_come_back_by_rank() -> None:
    assert run_ranks(total, 3, 10) == [(0, 33, 1), (1, 33, 1), (2, 33, 1)]


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 raised:.*one is not well") as caught:
        run_ranks(raise_on_one, 2)
    assert caught.value.rank == 1


def test_a_rank_that_dies_is_named_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 died without a result: exit code -9"):
        run_ranks(die_on_two, 3, timeout=30)
    assert time.monotonic() - started < 25


def test_a_rank_that_died_is_named_before_those_that_raise_because_of_it() -> None:
    """Of which one may hear first."""
    with pytest.raises(RankError, match=r"(?s)rank 1 died .* -9; rank 0 raised:.*nobody answers") as caught:
        run_ranks(die_after_the_other_raised, 2)
    assert caught.value.rank == 1


def test_a_rank_that_hangs_is_killed_and_its_stack_is_shown() -> None:
    with pytest.raises(RankError, match=r"(?s)rank . gave no result within 5 s.*hang_on_one") as caught:
        run_ranks(hang_on_one, 2, timeout=5)
    assert "-- rank 1 --" in str(caught.value)


def test_ranks_can_be_bound_to_cores() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    cores = [allowed[0], allowed[-1]]
    assert run_ranks(_affinity, 2, cores=cores) == [{cores[0]}, {cores[1]}]


def start_another_runtime(rank: int, world_size: int) -> str:
    with pytest.raises(UserError) as caught, Runtime.start(RunConfig(pin_cores=False)):
        pass
    assert dist.is_initialized(), "the group that was there is not ours to end"
    return str(caught.value)


def test_a_process_that_has_a_group_is_told_so() -> None:
    for said in run_ranks(start_another_runtime, 2):
        assert "already has a process group" in said and "ShardedEmbeddingBags" in said
