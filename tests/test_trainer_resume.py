"""Interrupted and uninterrupted training are the same training; checkpoints load on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_autoshard.config import Config
from dlrm_autoshard.training.checkpoints.manifest import CheckpointError
from tests.ranks import run_ranks
from tests.trainers import config, losses, make_runtime, plan_file, records, tensors, trainer

# 250 samples: epochs of 16 steps on 2 ranks, the last one uneven.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"dense_optimizer": {"name": "sgd", "lr": 0.2}},
    "adam, rowwise, schedule": {
        "dense_optimizer": {"name": "adam", "lr": 0.01, "weight_decay": 0.01},
        "tables": {"optimizer": {"name": "rowwise_adagrad", "lr": 0.05}},
        "schedule": {"warmup_steps": 9, "decay_start_step": 20, "decay_steps": 15},
    },
    "adagrad, asynchronous": {
        "dense_optimizer": {"name": "adagrad", "lr": 0.05},
        "tables": {"optimizer": {"name": "adagrad", "lr": 0.05}},
        "checkpoint": {"asynchronous": True},
    },
}


def settings(optimizer: str, **changes: Any) -> Config:
    sections: dict[str, Any] = {
        "data": {"test_samples": 60},
        "checkpoint": {"enabled": True, "every_steps": 5},
        "train": {"epochs": 3},
    }
    for section, values in [*OPTIMIZERS[optimizer].items(), *changes.items()]:
        sections[section] = {**sections.get(section, {}), **values}
    return config(**sections)


def interrupt(rank: int, world_size: int, folder: Path, optimizer: str) -> None:
    """One run in one go, and one in four pieces: stopped at mid-epoch, at an epoch's end, and by an exception in the
    step after a checkpoint."""
    runtime = make_runtime(rank, world_size)
    with trainer(settings(optimizer), runtime, folder / "whole") as made:
        made.run()
    for stop in (7, 16, 32):
        with trainer(settings(optimizer, train={"max_steps": stop}), runtime, folder / "pieces") as made:
            made.run()
    with trainer(settings(optimizer), runtime, folder / "pieces") as made:
        assert made.job.position.step == 32
        usual = made.job.step.run

        def killed(*given: Any, **options: Any) -> None:
            if made.job.position.step == 38:  # the last checkpoint is of step 35
                if rank == 0:
                    made.job.embeddings.plan.save(folder / "pieces/plan/step_00000037.json")  # as if tables had moved
                raise KeyboardInterrupt
            usual(*given, **options)

        made.job.step.run = killed  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            made.run()
        made.job.checkpoints.finish()
    with trainer(settings(optimizer), runtime, folder / "pieces") as made:
        assert (made.job.position.step, made.job.position.epoch, made.job.position.sample) == (35, 2, 48)
        made.run()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_interruption_changes_no_bit(optimizer: str, tmp_path: Path) -> None:
    run_ranks(interrupt, 2, tmp_path, optimizer, timeout=90)
    whole, pieces = losses(tmp_path / "whole"), losses(tmp_path / "pieces")
    assert [step for step, _ in whole] == list(range(1, 49))
    assert pieces == whole  # every step once, in order, and bit-equal
    evaluations = [
        [(r["step"], r["epoch"], r["auc"], r["logloss"]) for r in records(tmp_path / run) if r["split"] == "test"]
        for run in ("whole", "pieces")
    ]
    assert [(step, epoch) for step, epoch, *_ in evaluations[0]] == [(16, 0), (32, 1), (48, 2)]
    assert evaluations[1][0][0] == 7, "of where a piece ended, and none is due any more"
    assert evaluations[1][1:] == evaluations[0]
    for name in ("costs/epochs.jsonl", "costs/rank_00000.jsonl", "costs/rank_00001.jsonl"):
        intervals = [(r["first_step"], r["end_step"]) for r in records(tmp_path / "pieces", name)]
        # What ran after the checkpoint of step 35 until the exception is forgotten, with its interval.
        assert intervals == [(0, 7), (7, 16), (16, 32), (35, 48)], name
    plans = sorted(path.stem for path in (tmp_path / "pieces/plan").glob("step_*.json"))
    assert plans == [f"step_{step:08d}" for step in (0, 7, 16, 32, 35)], "of each start, and none that was given up"
    kept = sorted(path.name for path in (tmp_path / "pieces/checkpoints").iterdir())
    assert kept == ["step_00000045", "step_00000048"]


def train_and_give(rank: int, world_size: int, run_dir: Path, made_with: Config) -> dict[str, Tensor]:
    with trainer(made_with, make_runtime(rank, world_size), run_dir) as made:
        made.run()
        return tensors(made)


def load_and_give(rank: int, world_size: int, run_dir: Path, made_with: Config) -> tuple[dict[str, Tensor], list[int]]:
    """What is in memory after loading; then goes on, to the end."""
    with trainer(made_with, make_runtime(rank, world_size), run_dir) as made:
        loaded = tensors(made)
        start = made.job.position.step
        made.run()
        return loaded, [start, made.job.position.step, made.job.position.epoch, made.job.embeddings.updates]


@pytest.mark.parametrize("before,after,placement", [(2, 1, "0000"), (2, 3, "2002"), (3, 2, "1011")])
def test_loads_exactly_on_another_number_of_ranks(before: int, after: int, placement: str, tmp_path: Path) -> None:
    optimizer = "adam, rowwise, schedule"
    saved = run_ranks(train_and_give, before, tmp_path / "run", settings(optimizer, train={"max_steps": 7}))
    every = {key: value for rank in saved for key, value in rank.items()}
    moved = settings(optimizer, autoshard={"placement": plan_file(tmp_path, placement, after)})
    results = run_ranks(load_and_give, after, tmp_path / "run", moved)
    seen = {key for loaded, _ in results for key in loaded}
    assert seen == set(every)
    for loaded, _ in results:
        for key, value in loaded.items():
            assert torch.equal(value, every[key]), key
    # What is left of epoch 0, then two epochs, with the new global batch; no sample twice.
    left = 250 - 7 * 8 * before
    steps = 7 + -(-left // (8 * after)) + 2 * -(-250 // (8 * after))
    assert all(figures == [7, steps, 3, steps] for _, figures in results)
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, steps + 1))


def resume_elsewhere(rank: int, world_size: int, run_dir: Path, made_with: Config) -> tuple[list[str], int, bool]:
    with trainer(made_with, make_runtime(rank, world_size), run_dir) as made:
        made.run()
        finished = (run_dir / "result.json").exists()  # an earlier start's: this one has written none yet
        made.job.runtime.barrier()
        made.write_report()
        return made.job.notes, made.job.embeddings.plan.rank_of["user"], finished


def test_what_is_asked_of_plans_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    short, longer = settings("sgd", train={"max_steps": 7}), settings("sgd", train={"max_steps": 9})
    run_ranks(resume_elsewhere, 2, tmp_path, short)
    assert (tmp_path / "result.json").exists()
    for rank, anew in ((1, True), (1, False)):  # it began on rank 0
        asked = longer.autoshard.model_copy(update={"enabled": True, "pinned": {"user": rank}})
        pinned = longer.model_copy(update={"autoshard": asked})
        for notes, placed, finished in run_ranks(resume_elsewhere, 2, tmp_path, pinned, timeout=60):
            assert placed == rank and not finished
            assert ("tables were placed again" in " ".join(notes)) == anew


def costs_after_resuming(rank: int, world_size: int, run_dir: Path, made_with: Config) -> tuple[str, int] | None:
    """Where rank 0's planner has its costs from, and how many profiles it knows, before the first step."""
    with trainer(made_with, make_runtime(rank, world_size), run_dir) as made:
        planner = made.job.placement.planner
        known = None if planner is None else (planner.costs.costs_from, len(planner.costs.replay.profiles))
        made.run()
    return known


def test_a_resumed_job_decides_by_costs_of_its_own_ranks_or_of_those_it_was_shipped_with(tmp_path: Path) -> None:
    def epochs(number: int, enabled: bool) -> Config:
        return settings("sgd", train={"epochs": number}, autoshard={"enabled": enabled})

    assert run_ranks(costs_after_resuming, 2, tmp_path, epochs(1, False))[0] is None
    switched_on = run_ranks(costs_after_resuming, 2, tmp_path, epochs(2, True), timeout=60)[0]
    assert switched_on is not None and "shipped measurements" in switched_on[0]
    again = run_ranks(costs_after_resuming, 2, tmp_path, epochs(3, True), timeout=60)[0]
    assert again is not None and again[1] > 0
    on_three = run_ranks(costs_after_resuming, 3, tmp_path, epochs(4, True), timeout=60)[0]
    assert on_three is not None and on_three[1] == 0, "what was measured on two ranks says nothing of three"


def load_other_model(rank: int, world_size: int, run_dir: Path, other: dict[str, Any]) -> str:
    runtime = make_runtime(rank, world_size)
    before = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError) as caught, trainer(settings("sgd", **other), runtime, run_dir):
        pass
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    return str(caught.value)


def test_a_checkpoint_of_another_model_says_which_keys_differ(tmp_path: Path) -> None:
    run_ranks(train_and_give, 2, tmp_path, settings("sgd", train={"max_steps": 5}))
    message = run_ranks(load_other_model, 2, tmp_path, {"model": {"over_arch_layer_sizes": [6, 1]}})[1]
    assert "dense.over_mlp.0.weight is [10, 18], the model has [6, 18]" in message and "Nothing was loaded" in message
    message = run_ranks(load_other_model, 2, tmp_path, {"tables": {"optimizer": {"name": "rowwise_adagrad"}}})[0]
    assert "tables.item.momentum1 is not in it" in message
