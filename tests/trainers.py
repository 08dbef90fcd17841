"""Makes trainers inside ranks that `run_ranks` has started, so that one spawn serves many runs.

with trainer(config(tmp, train={"max_steps": 5}), rank, world_size, run_dir) as t: t.run()
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.config import Config, parse_config
from dlrm_autoshard.distributed.ranks.groups import new_group
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.training.trainer import Trainer

TABLES: list[dict[str, Any]] = [
    {"name": "user", "num_embeddings": 40, "embedding_dim": 8, "mean_pooling": 1.0},
    {"name": "item", "num_embeddings": 700, "embedding_dim": 4, "mean_pooling": 2.5},
    {"name": "tag", "num_embeddings": 9, "embedding_dim": 16, "mean_pooling": 0.5},  # half of its bags are empty
    {"name": "shop", "num_embeddings": 200, "embedding_dim": 8, "mean_pooling": 4.0},
]
"""Has three dims, so two projections; ids are skewed, so many samples of a batch share rows."""


def config(run_dir: Path | str = "runs", **sections: Any) -> Config:
    """Returns a config that trains in milliseconds a step; `train={"epochs": 3}` replaces single keys of a section."""
    record: dict[str, Any] = {
        "run": {"device": "cpu", "pin_cores": False, "dir": str(run_dir)},
        "data": {"source": "synthetic", "num_dense": 3, "train_samples": 250, "test_samples": 0, "tables": TABLES},
        "tables": {"optimizer": {"name": "sgd", "lr": 0.2}},
        "model": {"dense_arch_layer_sizes": [12, 8], "over_arch_layer_sizes": [10, 1]},
        "dense_optimizer": {"name": "sgd", "lr": 0.2},
        "train": {"batch_size": 8, "log_every_steps": 1},
        "checkpoint": {"enabled": False},
        "profile": {"every_steps": 3, "warmup_steps": 1},
    }
    for section, values in sections.items():
        record[section] = {**record.get(section, {}), **values}
    autoshard = record["autoshard"] = {"enabled": False, **record.get("autoshard", {})}
    autoshard["reshard"] = {"on_change": False, **autoshard.get("reshard", {})}  # steps of milliseconds are noise
    return parse_config(record)


def plan_file(folder: Path, ranks: str, world_size: int) -> str:
    """Writes a plan file with table i on rank ranks[i]; returns its path."""
    path = folder / f"plan_{ranks}_{world_size}.json"
    rank_of = {table["name"]: int(rank) for table, rank in zip(TABLES, ranks, strict=True)}
    path.write_text(json.dumps({"schema": 1, "world_size": world_size, "rank_of": rank_of}))
    return str(path)


def make_runtime(rank: int, world_size: int) -> Runtime:
    """Returns a runtime on the group that run_ranks has made."""
    minute = timedelta(seconds=60)
    assert dist.group.WORLD is not None
    return Runtime(
        rank,
        world_size,
        world_size,
        torch.device("cpu"),
        dist.group.WORLD,
        new_group(timeout=minute),
        new_group(timeout=minute),
    )


@contextlib.contextmanager
def trainer(settings: Config, runtime: Runtime, run_dir: Path, **options: Any) -> Iterator[Trainer]:
    if runtime.rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
    runtime.barrier()
    yield Trainer(settings, runtime, run_dir, **options)
    gc.collect()


def tensors(made: Trainer) -> dict[str, Tensor]:
    """Returns copies of all tensors that this rank would save."""
    return {name: value.detach().clone() for name, value in made.job.state.tensors().items()}


def records(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Returns (step, loss) of each logged training step, in the file's order."""
    return [(r["step"], r["logloss"]) for r in records(run_dir) if r["split"] == "train" and "logloss" in r]
