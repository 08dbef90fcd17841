"""What cannot fit into a host's memory is refused before it is asked for, counting all of the host's ranks."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_autoshard.config import Config, parse_config
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.training import start_checks
from dlrm_autoshard.training.job import Job
from dlrm_autoshard.training.run_log import doubts_of
from dlrm_autoshard.training.start_checks import check_sizes, free_and_sharers

LONG_BAGS = """
import torch
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.tables import TableConfig

class Bags:
    num_dense = 1
    def __init__(self, tables):
        self.tables = (TableConfig("user", 100, 4),)
    def num_samples(self, split):
        return 100_000 if split == "train" else 0
    def read(self, split, epoch, first, last):
        size = last - first
        lengths_TB = torch.full((1, size), 1000, dtype=torch.int32)
        values_N = torch.zeros(1000 * size, dtype=torch.int64)
        return Batch(torch.zeros(size, 1), lengths_TB, values_N, torch.zeros(size), size, size)
"""


def test_ids_are_counted_as_the_source_has_them_and_for_all_ranks_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "bags.py").write_text(LONG_BAGS)
    config = parse_config(
        {"data": {"source": "custom", "factory": f"{tmp_path}/bags.py:Bags"}, "train": {"batch_size": 10_000}}
    )
    source = open_source(config.data, config.tables)
    free_bytes = 100 << 20  # the ids alone take 8 bytes * 1000 * 10,000 samples = 76 MiB a rank
    check_sizes(config, source, 2, free_bytes, host_ranks=1)
    with pytest.raises(
        UserError, match=r"10,000 samples needs at least .* on each of the 2 ranks that share its memory"
    ) as caught:
        check_sizes(config, source, 2, free_bytes, host_ranks=2)
    assert "Lower train.batch_size (10,000)" in str(caught.value)


def test_on_a_gpu_it_is_the_gpus_memory_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the driver: GPUs with 3 GiB free each, and what four ranks say of theirs."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as each rank sees it under --gpus-per-task=1
    monkeypatch.setattr(start_checks, "host_id", lambda: "here")

    def sharers(device: str, others: list[tuple[str, str]]) -> tuple[int, int]:
        monkeypatch.setattr(start_checks, "name_of", lambda _: device)
        runtime: Any = SimpleNamespace(device=torch.device(device[:4].strip()), rank=0)
        runtime.all_gather = lambda mine: [mine, *others]
        return free_and_sharers(runtime)

    assert sharers("cuda a", [("here", f"cuda {gpu}") for gpu in "bcd"]) == (3 << 30, 1)
    assert sharers("cuda a", [("here", f"cuda {gpu}") for gpu in "abb"]) == (3 << 30, 2)
    assert sharers("cpu", [("here", "cpu"), ("there", "cpu")])[1] == 2


def job(config: Config, steps: int, interval: int, samples: int = 10_000, ranks: int = 2) -> Job:
    """What is asked of a job that is about to start."""
    global_batch = config.train.batch_size * ranks
    return SimpleNamespace(  # type: ignore[return-value]
        config=config,
        data=SimpleNamespace(samples=samples, global_batch=global_batch, steps_of_epoch=-(-samples // global_batch)),
        runtime=SimpleNamespace(world_size=ranks),
        total_steps=steps,
        position=SimpleNamespace(step=0),
        interval_steps=interval,
    )


@pytest.mark.parametrize(
    ("sections", "about", "said"),
    [
        ({}, {"steps": 1000, "interval": 100}, None),
        (
            {},
            {"steps": 100, "interval": 100},
            r"after 100 steps, and 100 are left. Lower autoshard.reshard.every_steps",
        ),
        ({}, {"steps": 3, "interval": 100}, r"an epoch has 3 steps, and the first 5 are never sampled"),
        ({"profile": {"enabled": False}}, {"steps": 1000, "interval": 100}, r"nothing is measured \(profile.enabled"),
        ({"autoshard": {"enabled": False}}, {"steps": 3, "interval": 100}, None),
        ({}, {"steps": 3, "interval": 100, "ranks": 1}, None),
        (
            {"autoshard": {"enabled": False}},
            {"steps": 2, "interval": 1, "samples": 30},
            r"A step takes 64 samples \(32 on each of 2 ranks\), but there are 30: an epoch is a single, smaller step",
        ),
    ],
)
def test_what_is_surely_not_wanted_is_doubted_in_a_sentence(
    sections: dict[str, Any], about: dict[str, int], said: str | None
) -> None:
    config = parse_config({"data": {"source": "movielens"}, "train": {"batch_size": 32}, **sections})
    doubts = doubts_of(job(config, **about))
    assert (doubts == []) if said is None else re.search(said, " ".join(doubts))
