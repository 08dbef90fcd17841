"""A rank that becomes slower in mid-epoch, among real ranks: noticed there, and decided on before the epoch ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dlrm_autoshard.autoshard.sampling import steps_of_part
from dlrm_autoshard.config import Config
from dlrm_autoshard.records.epoch import EpochProfile, epochs_file
from dlrm_autoshard.records.jsonl import read_jsonl
from tests.ranks import run_ranks
from tests.trainers import config, make_runtime, records, trainer

STEPS, SLOW_FROM = 160, 80


def train_with_a_slow_rank(rank: int, world_size: int, job: Config, run_dir: Path) -> None:
    with trainer(job, make_runtime(rank, world_size), run_dir) as made:
        lookup = made.embeddings.lookup

        def slowed(*given: Any, **options: Any) -> Any:
            time.sleep(0.03 * (1 + (rank == 1 and made.position.step >= SLOW_FROM)))
            return lookup(*given, **options)

        made.embeddings.lookup = slowed  # type: ignore[method-assign]
        made.run()


def job(folder: Path, every_epochs: int) -> Config:
    data, reshard = {"train_samples": 16 * STEPS}, {"on_change": True, "every_epochs": every_epochs}
    settings = {"enabled": True, "measure_plans": 0, "algorithm": "lookup_greedy", "reshard": reshard}
    return config(folder, data=data, profile={"every_steps": 8}, autoshard=settings)


def epochs(run_dir: Path) -> list[EpochProfile]:
    return [EpochProfile.from_json(line) for line in read_jsonl(epochs_file(run_dir))]


@pytest.mark.parametrize("every_epochs", [1, 3])
def test_a_slower_rank_is_noticed_and_decided_on_in_mid_epoch(tmp_path: Path, every_epochs: int) -> None:
    """However seldom decisions are asked for."""
    run_dir = tmp_path / "run"
    run_ranks(train_with_a_slow_rank, 2, job(tmp_path, every_epochs), run_dir, timeout=90)
    found = epochs(run_dir)
    assert [e.first_step for e in found] == [0, *(e.end_step for e in found[:-1])] and found[-1].end_step == STEPS
    after = [e for e in found if e.first_step >= SLOW_FROM]
    assert after and after[0].first_step <= SLOW_FROM + 8 + 3 * 2  # a usual sample, and some more of them
    assert after[0].samples >= 8 and after[0].end_step < STEPS - 40
    first = next(d for d in records(run_dir, "decisions.jsonl") if d["step"] > SLOW_FROM)
    assert first["step"] == after[0].end_step and first["balance_gain"] > 0.1


def test_an_epoch_of_many_steps_is_decided_on_in_equal_parts() -> None:
    """20 times in a job, unless intervals would be shorter than 1,000 steps, or epochs are shorter."""
    assert steps_of_part(epoch=250, total=250) == steps_of_part(epoch=250, total=10_000) == 250
    assert steps_of_part(epoch=1000, total=4000) == 1000
    assert steps_of_part(epoch=2500, total=2500) == 834
    assert steps_of_part(epoch=100_000, total=100_000) == 5000
    assert steps_of_part(epoch=100_000, total=300_000) == 14_286
    assert steps_of_part(epoch=1000, total=10**6) == 1000
    assert steps_of_part(epoch=0, total=0) == 0
