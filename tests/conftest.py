"""Fixtures for every test file."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as jobs' ranks have it; read where torch is imported first

import pytest
import torch.distributed as dist

# Hundreds of processes import this package: once compiled is enough, whatever is usual on this machine.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left() -> Iterator[None]:
    """Ends the group that bags make in the test's own process: the next file's jobs start their own."""
    cores = os.sched_getaffinity(0)
    yield
    assert os.sched_getaffinity(0) == cores, (
        "a test left this process, and all that it will start, bound to fewer cores"
    )
    if dist.is_initialized():
        dist.destroy_process_group()
