"""Random jobs, of all ways to hold and look up a table at once, train as plain PyTorch does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.random_jobs import worst_differences
from tests.ranks import run_ranks


def assert_like_plain_torch(seeds: list[int], folder: Path) -> None:
    by_rank = run_ranks(worst_differences, 3, seeds, str(folder), timeout=400)
    worst = {seed: max(of_job) for seed, of_job in zip(seeds, zip(*by_rank, strict=True), strict=True)}
    assert not {seed: value for seed, value in worst.items() if value > 1e-6}


def test_random_jobs_train_as_plain_torch_does(tmp_path: Path) -> None:
    assert_like_plain_torch(list(range(24)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", [24, 124, 224])
def test_many_random_jobs_train_as_plain_torch_does(first: int, tmp_path: Path) -> None:
    assert_like_plain_torch(list(range(first, first + 100)), tmp_path)
