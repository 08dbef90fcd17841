"""Smaller number formats, each with its AUC beside full precision: 16-bit exchange, bf16 MLPs, fp16 tables.

Two ranks, the same seeds and samples in every run; synthetic click logs, and MovieLens where its data are
(`dlrm-autoshard data movielens`; the directory is data/movielens-100k, or what DLRM_AUTOSHARD_MOVIELENS names).
Speed is that of W-emb's steps on two ranks, each option in turn with full precision: with the exchange through shared
memory, as on one host, and through TCP, as between hosts.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

TITLE = "16-bit exchange, bf16 dense part and fp16 tables: speed, and AUC beside full precision"
ROUGH_TIME = "3 min"
MOVIELENS = "DLRM_AUTOSHARD_MOVIELENS"
OPTIONS: dict[str, dict[str, dict[str, str]]] = {
    "full precision": {},
    "fp16 exchange": {"train": {"exchange_dtype": "fp16"}},
    "bf16 exchange": {"train": {"exchange_dtype": "bf16"}},
    "bf16 dense": {"train": {"dense_dtype": "bf16"}},
    "fp16 tables": {"tables": {"dtype": "fp16"}},
}
_SYNTHETIC: dict[str, Any] = {
    "data": {
        "source": "synthetic",
        "train_samples": 100_000,
        "test_samples": 50_000,
        "tables": [
            {"name": "user", "num_embeddings": 2000},
            {"name": "item", "num_embeddings": 1000},
            {"name": "clicked", "num_embeddings": 1000, "mean_pooling": 8},
            {"name": "country", "num_embeddings": 50, "alpha": 1.5},
        ],
    },
    "train": {"batch_size": 256, "epochs": 2},
    "model": {"dense_arch_layer_sizes": [32, 16], "over_arch_layer_sizes": [32, 1]},
    "tables": {"embedding_dim": 16, "optimizer": {"name": "rowwise_adagrad", "lr": 0.05}},
}
_MOVIELENS: dict[str, Any] = {
    "data": {"source": "movielens"},
    "train": {"batch_size": 1024, "epochs": 4},
    "model": {"dense_arch_layer_sizes": [64, 16], "over_arch_layer_sizes": [16, 1]},
    "tables": {"embedding_dim": 16, "optimizer": {"name": "rowwise_adagrad", "lr": 0.05}},
    "schedule": {"decay_steps": 176, "decay_power": 1.0, "end_lr_ratio": 0.05},
}


def run(quick: bool) -> dict[str, Any]:
    from dlrm_autoshard.benchmarks.harness import on_pinned_ranks, paired_ratio
    from dlrm_autoshard.benchmarks.train_speed import slowest_rank

    figures: dict[str, Any] = {}
    spread: dict[str, list[float]] = {}
    targets, notes = {}, []
    folder = Path(os.environ.get(MOVIELENS, "data/movielens-100k"))
    settings = {"synthetic": _SYNTHETIC}
    if folder.exists():
        settings["movielens"] = {**_MOVIELENS, "data": {"source": "movielens", "dir": str(folder)}}
    else:
        notes.append(f"no MovieLens: '{folder}' is not there; see `dlrm-autoshard data`")
    seeds = range(1) if quick else range(3)
    for name, record in settings.items():
        auc = on_pinned_ranks(_auc_of_each, 2, record, list(seeds))[0]
        full = statistics.mean(auc["full precision"])
        figures[f"{name}, full precision: AUC"] = round(full, 5)
        for option in OPTIONS:
            if option != "full precision":
                figures[f"{name}, {option}: AUC lost"] = round(full - statistics.mean(auc[option]), 5)
                targets[f"{name}, {option}: AUC lost"] = "<= 0.001"
    for link, shared_memory, options in (
        ("shared memory", True, list(OPTIONS)),
        ("TCP", False, [option for option in OPTIONS if "tables" not in option]),
    ):
        seconds = on_pinned_ranks(_seconds_of_each, 2, options, shared_memory, 3 if quick else 8)
        for option in options[1:]:
            ratio = paired_ratio(slowest_rank(seconds, options[0]), slowest_rank(seconds, option))
            figure = f"W-emb, {option}, exchange through {link}: speed over full precision"
            figures[figure], spread[figure] = round(ratio.median, 3), [round(ratio.low, 3), round(ratio.high, 3)]
    return {"figures": figures, "targets": targets, "spread": spread, "notes": notes}


def _seconds_of_each(
    rank: int, world_size: int, options: list[str], shared_memory: bool, rounds: int
) -> dict[str, list[float]]:
    import torch.distributed as dist

    from dlrm_autoshard.benchmarks.workloads import W_EMB, OurJob
    from dlrm_autoshard.distributed.runtime import keep_freed_memory

    keep_freed_memory()
    plan, batches = W_EMB.plan(world_size), W_EMB.batches(rank, world_size)
    jobs = {}
    for option in options:
        sections = OPTIONS[option]
        dtype: Any = sections.get("tables", {}).get("dtype", "fp32")
        train: dict[str, Any] = dict(sections.get("train", {}))
        jobs[option] = OurJob(
            replace(W_EMB, table_dtype=dtype), plan, rank, batches, shared_memory=shared_memory, **train
        )
        jobs[option].run(3)
    seconds: dict[str, list[float]] = {option: [] for option in options}
    for _ in range(rounds):
        for option, job in jobs.items():
            dist.barrier()
            seconds[option].append(job.run(5))
    return seconds


def _auc_of_each(rank: int, world_size: int, record: dict[str, Any], seeds: list[int]) -> dict[str, list[float]]:
    """Test AUC by option and seed, on rank 0."""
    import contextlib

    import torch
    import torch.distributed as dist

    from dlrm_autoshard.config import parse_config
    from dlrm_autoshard.distributed.runtime import Runtime
    from dlrm_autoshard.train.trainer import Trainer

    world = dist.group.WORLD
    assert world is not None
    cpu = torch.device("cpu")
    auc: dict[str, list[float]] = {option: [] for option in OPTIONS}
    with tempfile.TemporaryDirectory() as folder:
        for option, sections in OPTIONS.items():
            for seed in seeds:
                merged = {key: {**record.get(key, {}), **sections.get(key, {})} for key in {*record, *sections}}
                config = parse_config(
                    {
                        "run": {"device": "cpu", "pin_cores": False, "seed": seed},
                        "checkpoint": {"enabled": False},
                        "profile": {"enabled": False},
                        **merged,
                    }
                )
                run_dir = Path(folder, f"{option}-{seed}".replace(" ", "-"))
                run_dir.mkdir()
                runtime = Runtime(rank, world_size, rank, world_size, cpu, world, dist.new_group(), dist.new_group())
                with open(run_dir / "said.txt", "w") as said, contextlib.redirect_stdout(said):
                    metrics = Trainer(config, runtime, run_dir).run().metrics
                auc[option].append(metrics.get("auc", 0.0))
    return auc
