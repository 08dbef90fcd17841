"""Our random numbers are ours: a model that draws (Dropout, say) draws the same whatever we plan and measure."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_autoshard.planner.planner import ALGORITHMS, Planner
from tests.planning_problems import some_task
from tests.ranks import run_ranks
from tests.torchrec_jobs import WHY_NOT, Model, features_of
from tests.trainers import config, losses, make_runtime, plan_file, trainer

TOWER = """
import torch
from dlrm_autoshard import DenseArch


class Tower(DenseArch):
    def __init__(self, num_dense, tables):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.first = torch.nn.Linear(num_dense, 6)
        self.last = torch.nn.Linear(6 + sum(table.embedding_dim for table in tables), 1)

    def bottom(self, dense):
        return self.dropout(self.first(dense))

    def top(self, bottom, pooled):
        return self.last(self.dropout(torch.cat([bottom, pooled], 1))).squeeze(1)
"""


def generators() -> tuple[object, ...]:
    """The state of everybody's generators: Python's, NumPy's and torch's."""
    numpy_state = np.random.get_state(legacy=False)["state"]
    return random.getstate(), numpy_state["key"].tolist(), numpy_state["pos"], torch.get_rng_state().tolist()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_planner_draws_from_generators_that_are_not_its_own(algorithm: str) -> None:
    before = generators()
    Planner(algorithm).plan(some_task(6, 2), budget_seconds=0.2)
    assert generators() == before


def train(rank: int, world_size: int, folder: Path) -> list[tuple[object, ...]]:
    """The generators' state of a job that measures plans and tables, and of one that does not."""
    runtime, found = make_runtime(rank, world_size), []
    plan = plan_file(folder, "0110", world_size)
    model = {"factory": f"{folder / 'tower.py'}:Tower"}
    measured = {"enabled": True, "budget_seconds": 2.0, "cache_dir": None}
    jobs: dict[str, dict[str, Any]] = {
        "without": {"autoshard": {"placement": plan}},
        "decides": {"autoshard": {"enabled": True, "placement": plan, "reshard": {"min_gain": 0.99}}},
        "measures": {"autoshard": measured, "train": {"epochs": 10**8}},
    }
    for name, sections in jobs.items():
        settings = config(folder, **{"train": {"epochs": 3}, **sections, "model": model})
        with trainer(settings, runtime, folder / name) as made:
            found.append(generators())
            if name != "measures":
                made.run()
    return found


def test_a_model_with_dropout_trains_alike_with_autoshard_and_without(tmp_path: Path) -> None:
    (tmp_path / "tower.py").write_text(TOWER)
    for without, decides, measures in run_ranks(train, 2, tmp_path, timeout=120):
        assert without == decides == measures
    assert losses(tmp_path / "without") == losses(tmp_path / "decides")
    assert len(losses(tmp_path / "without")) == 48


def plan_for_torchrec(rank: int, world_size: int) -> bool:
    import dlrm_autoshard as das

    module, ids = Model(), features_of(rank, 0)
    before = generators()
    das.torchrec.plan(module, ids, optimizer="sgd", measure_plans=2)
    return generators() == before


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
def test_a_plan_for_torchrec_draws_nothing_of_the_users() -> None:
    assert run_ranks(plan_for_torchrec, 2, timeout=120) == [True, True]
