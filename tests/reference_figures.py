"""Runs the published DreamShard code on our tasks, and writes its figures to reference_figures.json:

git clone https://github.com/daochenzha/dreamshard && python -m tests.reference_figures dreamshard
Networks, MDP, buffer, losses and budget are its own; our cost oracle replaces the GPUs.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import types
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_autoshard.benchmarks.cost_oracle import CostOracle
from dlrm_autoshard.plan import Topology
from dlrm_autoshard.planner.costs.features import raw_features
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.search.greedy import KEYS, greedy
from dlrm_autoshard.planner.task import PlacementTask

RECORD = Path(__file__).with_suffix(".json")
TABLES, DEVICES, BATCH, TASKS, SEEDS = 20, 4, 65_536, 6, 3
FEATURES = ["dim", "row", "pooling_factor", "size", *(f"bin_{i}" for i in range(17))]


def drawn_tasks() -> list[tuple[PlacementTask, CostOracle]]:
    drawn = []
    for index in range(TASKS):
        pool = synthetic_pool(TABLES, seed=500 + index, batch_size=BATCH)
        task = PlacementTask.build(pool.tables, pool.stats, Topology(DEVICES), batch_size=BATCH)
        drawn.append((task, CostOracle(pool.tables, pool.stats, BATCH, DEVICES, seed=500 + index)))
    return drawn


def over_best_heuristic(task: PlacementTask, oracle: CostOracle, rank_T: np.ndarray) -> float:
    """Returns the exact cost over that of the best of the paper's heuristics."""
    return oracle.step_ms(rank_T) / min(oracle.step_ms(greedy(task, name)) for name in KEYS)


def main(repository: Path) -> None:
    sys.path.insert(0, str(repository))
    sys.modules["gym"] = gym = types.ModuleType("gym")  # of which it uses the names only
    gym.Env, gym.spaces = object, types.SimpleNamespace(Box=lambda **_: None, Discrete=lambda n: None)  # type: ignore[attr-defined]
    from dreamshard import sharders, training
    from dreamshard.env import Env
    from dreamshard.models import Model

    drawn = drawn_tasks()

    class OracleEvaluator:
        def __init__(self, *_: Any) -> None: ...

        def evaluate(self, number: int, sharding: Sequence[int]) -> tuple[float, np.ndarray]:
            task, oracle = drawn[number]
            profile = oracle.profile(task.plan_from(np.array(sharding)))
            ms = np.array([[r.fwd_compute_ms, r.fwd_comms_ms, r.bwd_comms_ms, r.bwd_compute_ms] for r in profile.ranks])
            return float(ms.sum(axis=1).max()), ms.astype(np.float32)

        def terminate(self) -> None: ...

    training.Evaluator = OracleEvaluator
    ratios = []
    for seed in range(SEEDS):
        np.random.seed(seed)
        torch.manual_seed(seed)
        with tempfile.TemporaryDirectory() as folder:
            _write_tables(Path(folder), [task for task, _ in drawn])
            tasks = "\n".join(",".join(str(n * TABLES + i) for i in range(TABLES)) for n in range(TASKS))
            (Path(folder) / "tasks.txt").write_text(tasks)
            arguments = Namespace(
                data_dir=folder, task_path=f"{folder}/tasks.txt", gpu_devices="0", ndevices=DEVICES, max_memory=10**9,
                num_iterations=10, bench_steps=10, rl_num_batches=10, rl_batch_size=10, bench_training_steps=300,
                entropy_weight=0.001, batch_size=64, out_dir=folder,
            )  # fmt: skip
            with contextlib.redirect_stdout(io.StringIO()):
                training.train(arguments)
            model = Model(table_feature_dim=21)
            model.load_state_dict(torch.load(f"{folder}/9.pt"))
            for number, (task, oracle) in enumerate(drawn):
                ids = range(number * TABLES, (number + 1) * TABLES)
                _, features, sizes = training.load_table_configs_features_sizes(folder, list(ids))
                sharding = sharders.shard(Env(features, sizes, model, DEVICES, 10**9), "dreamshard")
                ratios.append(over_best_heuristic(task, oracle, np.array(sharding)))
        print(f"seed {seed}: {np.mean(ratios[-TASKS:]):.3f} of the best heuristic", flush=True)
    commit = subprocess.check_output(["git", "-C", repository, "rev-parse", "HEAD"], text=True).strip()
    record = {
        "code": "github.com/daochenzha/dreamshard",
        "commit": commit,
        "made_by": "tests/reference_figures.py",
        "cost_over_best_heuristic": [round(ratio, 4) for ratio in ratios],
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def _write_tables(folder: Path, tasks: Sequence[PlacementTask]) -> None:
    rows = [row for task in tasks for row in raw_features(task.tables, task.stats).tolist()]
    tables = [dict(zip(FEATURES, row, strict=True)) for row in rows]
    (folder / "table_configs.json").write_text(json.dumps({"tables": tables}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
