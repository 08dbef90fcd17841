"""A batch in parts trains as the whole batch does: tables and weights are updated once, whatever the optimizers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dlrm_autoshard.config import Config
from tests.ranks import run_ranks
from tests.trainers import config, losses, make_runtime, plan_file, tensors, trainer


def train(rank: int, world_size: int, folder: Path, runs: dict[str, Config]) -> dict[str, dict[str, Tensor]]:
    runtime, found = make_runtime(rank, world_size), {}
    for name, settings in runs.items():
        with trainer(settings, runtime, folder / name) as made:
            made.run()
            found[name] = tensors(made)
    return found


def test_parts_train_as_the_whole_batch_does(tmp_path: Path) -> None:
    """Over an uneven last batch, of which some parts have no samples, and sampled steps."""
    runs = {}
    for optimizer in ("sgd", "adagrad", "rowwise_adagrad"):
        for parts in (1, 3):
            runs[f"{optimizer} {parts}"] = config(
                tables={"optimizer": {"name": optimizer, "lr": 0.1}},
                data={"train_samples": 2 * 8 * 10 - 11},
                train={"accumulate": parts, "epochs": 2, "on_nan": "skip"},
                dense_optimizer={"name": "sgd", "lr": 0.1, "max_gradient_norm": 0.5},
                profile={"every_steps": 3, "warmup_steps": 0},
                autoshard={"placement": plan_file(tmp_path, "0110", 2)},
            )
    for found in run_ranks(train, 2, tmp_path, runs, timeout=90):
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad"):
            whole, parts = found[f"{optimizer} 1"], found[f"{optimizer} 3"]
            assert whole.keys() == parts.keys()
            for name, value in whole.items():
                torch.testing.assert_close(parts[name], value, atol=2e-5, rtol=1e-4, msg=f"{optimizer}, {name}")
    for optimizer in ("sgd", "adagrad", "rowwise_adagrad"):
        once, in_parts = (np.array(losses(tmp_path / f"{optimizer} {n}")) for n in (1, 3))
        assert len(once) == 20 and once == pytest.approx(in_parts, abs=1e-5)
