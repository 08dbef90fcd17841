"""Ranks compute on cores of their own: by NUMA node, never outside of what they may use, never on another job's."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_autoshard.config import RunConfig
from dlrm_autoshard.data.batch import Batch, Split
from dlrm_autoshard.data.loader import Loader
from dlrm_autoshard.distributed.ranks.cores import share_of
from dlrm_autoshard.distributed.ranks.runtime import Runtime, keep_freed_memory
from tests.scripted_source import Scripted

pytestmark = pytest.mark.alone

RANK = """
import os, sys
from dlrm_autoshard.distributed.ranks.cores import own_cores

os.sched_setaffinity(0, eval(sys.argv[3]))
with own_cores(int(sys.argv[1]), int(sys.argv[2]), 1) as cores:
    print(sorted(os.sched_getaffinity(0)), sorted(cores.loader), sep=";", flush=True)
    sys.stdin.read()
"""
ALLOWED = os.sched_getaffinity(0)


class Jobs:
    """Ranks that hold their cores until the end of the test."""

    def __init__(self) -> None:
        self.ranks: list[subprocess.Popen[str]] = []

    def rank(self, local_rank: int, local_world_size: int, allowed: set[int] = ALLOWED) -> tuple[set[int], set[int]]:
        """Where a new rank computes, and where its loader reads."""
        command = [sys.executable, "-c", RANK, str(local_rank), str(local_world_size), str(allowed)]
        rank = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
        )
        self.ranks.append(rank)
        assert rank.stdout is not None
        compute, loader = rank.stdout.readline().split(";")
        return set(eval(compute)), set(eval(loader))

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()
        self.ranks.clear()


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.mark.skipif(len(ALLOWED) < 2, reason="one core is all that there is")
def test_two_jobs_share_no_core_and_a_killed_one_lets_go_of_its(jobs: Jobs) -> None:
    two = set(sorted(ALLOWED)[-2:])
    try:
        one, other = jobs.rank(0, 1, two), jobs.rank(0, 1, two)
        assert len(one[0]) == len(other[0]) == 1 and one[0] | other[0] == two
        assert one[1] == two - one[0], "the loader has another core where there is one"
        assert jobs.rank(0, 1, two)[0] == two, "a third job is bound to none, but not let out of what it may use"
        jobs.end()
        assert len(jobs.rank(1, 2, two)[0]) == 1
    finally:
        jobs.end()


def test_never_outside_of_what_is_allowed(jobs: Jobs) -> None:
    last = {max(ALLOWED)}
    try:
        assert jobs.rank(0, 1, last) == (last, last)
        assert jobs.rank(0, 2, last)[0] == last, "two ranks, one core"
    finally:
        jobs.end()


@given(
    nodes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    ranks=st.integers(1, 16),
)
def test_shares_are_disjoint_equal_and_on_one_node_where_nodes_have_enough(nodes: list[int], ranks: int) -> None:
    cores = iter(range(1000))
    split = [[next(cores) for _ in range(size)] for size in nodes]
    shares = [share_of(rank, ranks, split) for rank in range(ranks)]
    taken = [core for share in shares for core in share]
    assert len(taken) == len(set(taken)) and set(taken) <= {core for node in split for core in node}
    if ranks <= sum(nodes) and len(set(nodes)) == 1 and ranks % len(nodes) == 0:
        assert {len(share) for share in shares} == {len(nodes) * nodes[0] // ranks}
        assert all(any(set(share) <= set(node) for node in split) for share in shares)


def test_the_loaders_thread_runs_on_its_cores_alone() -> None:
    seen: list[set[int]] = []

    class Watched(Scripted):
        def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
            seen.append(os.sched_getaffinity(0))
            return super().read(split, epoch, first, last)

    with Loader(Watched(), "train", 0, 50, 0, 1, cores={min(ALLOWED)}) as loader:
        assert len(list(loader)) == 2
    assert seen == [{min(ALLOWED)}] * 2 and os.sched_getaffinity(0) == ALLOWED


def test_a_process_that_was_a_rank_is_as_it_was_afterwards() -> None:
    """A notebook that evaluates a run keeps its cores, threads and environment, however the evaluation ends."""

    def process() -> tuple[object, ...]:
        return os.sched_getaffinity(0), torch.get_num_threads(), dict(os.environ)

    before = process()
    for _ in range(2):
        with pytest.raises(KeyError), Runtime.start(RunConfig(device="cpu", threads_per_rank=1)):
            assert len(os.sched_getaffinity(0)) == 1
            raise KeyError
        assert process() == before


@pytest.mark.parametrize("most", [1 << 30, 1 << 25])
def test_freed_memory_is_kept_also_by_an_old_glibc(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which refuses thresholds above 32 MiB; without one, any buffer over 128 KiB would be mapped anew each time."""
    set_to = {}

    class Libc:
        def mallopt(self, what: int, value: int) -> int:
            if what == -3 and value > most:
                return 0
            set_to[what] = value
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Libc())
    keep_freed_memory()
    assert set_to == {-3: most, -1: 1 << 30}
