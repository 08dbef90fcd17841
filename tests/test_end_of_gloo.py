"""The end of a process whose gloo threads are late with their last work."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from dlrm_autoshard.distributed.ranks.groups import wait_for_gloo
from tests.ranks import run_ranks


def _waits(rank: int, world_size: int) -> bool:
    begun, done = threading.Event(), threading.Event()

    def work(_: Any) -> None:
        begun.set()
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            pass
        done.set()

    if rank == 1:
        time.sleep(0.2)  # until rank 0's thread waits, with the work that follows
    summed = dist.all_reduce(torch.ones(1), async_op=rank == 0)
    if summed is None:
        return True
    summed.get_future().then(work)
    assert begun.wait(30)
    wait_for_gloo()
    return done.is_set()


def test_a_process_waits_for_the_work_that_gloo_does_after_a_collective() -> None:
    assert all(run_ranks(_waits, 2, timeout=60))
