"""Trains jobs under given plans inside ranks that `run_ranks` has started, and predicts from a run on other ranks.

run_ranks(train, 2, [(job(tmp_path, "whole", WHOLE, 2), tmp_path / "run")])
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from torch import Tensor

from dlrm_autoshard.config import Config
from dlrm_autoshard.plan import ShardingPlan
from tests.trainers import config, make_runtime, tensors, trainer

WHOLE = {"user": 0, "item": 1, "tag": 0, "shop": 1}


def job(folder: Path, name: str, rank_of: dict[str, int] | None, world_size: int, **sections: object) -> Config:
    path = folder / f"{name}.json"
    if rank_of is not None:
        ShardingPlan(rank_of, world_size).save(path)
        sections = {"autoshard": {"placement": str(path)}} | sections
    made = {"tables": {"optimizer": {"name": "adagrad", "lr": 0.1}}, "train": {"epochs": 2}, **sections}
    return config(folder, **made)


def train(rank: int, world_size: int, jobs: list[tuple[Config, Path]]) -> list[dict[str, Tensor]]:
    runtime, found = make_runtime(rank, world_size), []
    for settings, run_dir in jobs:
        with trainer(settings, runtime, run_dir) as made:
            made.run()
            found.append(tensors(made))
    return found


def predicted(run: Path, ranks: int) -> np.ndarray:
    out = run.parent / f"by_{ranks}.npy"
    predict = ["predict", str(run), "--split=train", f"--ranks={ranks}", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "dlrm_autoshard", *predict], check=True, timeout=120, capture_output=True)
    found: np.ndarray = np.load(out)
    return found
