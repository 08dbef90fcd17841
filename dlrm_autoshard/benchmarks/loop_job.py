"""An embedding-heavy job for resharding's benchmarks, run on two pinned ranks, one setting after another.

runs = run_jobs([Job("static", config), Job("loop", other)], folder)
runs["loop"].throughput(first=2)             # examples/s over epochs 2, 3, ...
runs["loop"].decisions                       # lines of decisions.jsonl
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_autoshard.benchmarks.harness import on_pinned_ranks
from dlrm_autoshard.benchmarks.plans_interleaved import WORLD_SIZE, busy_neighbour
from dlrm_autoshard.benchmarks.workloads import W_EMB
from dlrm_autoshard.config import Config, parse_config
from dlrm_autoshard.data.batch import Split
from dlrm_autoshard.data.loader import Loader
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.distributed.ranks.runtime import Runtime, keep_freed_memory, runtime_of
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.interval import IntervalProfile, epochs_file
from dlrm_autoshard.records.jsonl import read_jsonl
from dlrm_autoshard.training.trainer import Trainer

JOB = replace(W_EMB, batch_size=1024, num_batches=8)
"""Workload of the jobs, for plans to be measured beside one another."""


MANY_SAMPLES = {"every_steps": 4, "warmup_steps": 2}


@dataclass(frozen=True)
class Job:
    """busy_epochs: in which a busy process shares the last rank's core. trains: or only starts."""

    name: str
    config: Config
    busy_epochs: tuple[int, ...] = ()
    trains: bool = True


def profiling_seconds(epochs: Iterable[IntervalProfile]) -> float:
    """By which sampled steps, which have barriers and no overlap, were longer than the mean one; noise may make it less
    than nothing."""
    seconds = 0.0
    for e in epochs:
        stages = [*e.stage_ms.values(), *e.wait_ms.values()]
        sampled_ms = max((sum(ms) for ms in zip(*stages, strict=True)), default=0.0)
        if e.samples and e.throughput > 0:
            seconds += e.samples * (sampled_ms - 1000 * e.batch_size / e.throughput) / 1000
    return seconds


@dataclass(frozen=True)
class JobRun:
    """Records of a job."""

    epochs: tuple[IntervalProfile, ...]
    decisions: tuple[Mapping[str, Any], ...]
    start_seconds: float

    @property
    def final_plan(self) -> ShardingPlan:
        return self.epochs[-1].plan

    @property
    def profile_errors(self) -> list[float]:
        return [d["error_before"] for d in self.decisions if d.get("error_before") is not None]

    def throughput(self, first: int, last: int | None = None) -> float:
        """examples/s over the steps of epochs first to last."""
        chosen = [e for e in self.epochs if e.epoch >= first and (last is None or e.epoch <= last)]
        examples = [(e.end_step - e.first_step) * e.batch_size for e in chosen]
        return sum(examples) / sum(n / e.throughput for n, e in zip(examples, chosen, strict=True))

    @property
    def seconds(self) -> float:
        """Seconds of training alone."""
        return sum((e.end_step - e.first_step) * e.batch_size / e.throughput for e in self.epochs)

    @property
    def loop_seconds(self) -> float:
        """For which training stood still: searching and moving."""
        return sum(d["decide_seconds"] + d["move_seconds"] for d in self.decisions)

    @property
    def moves(self) -> int:
        return sum(d["action"] in ("moved", "rolled_back") for d in self.decisions)

    @property
    def texts(self) -> list[str]:
        return [f"step {d['step']}: {d['text']}" for d in self.decisions if d["action"] != "kept"]


def settings(
    folder: Path,
    *,
    epochs: int,
    steps_per_epoch: int,
    pooling: Sequence[float] = W_EMB.pooling,
    drift: Sequence[Mapping[str, Any]] = (),
    profile: Mapping[str, Any] = MANY_SAMPLES,
    **autoshard: Any,
) -> Config:
    """W-emb's tables with smaller batches. profile: {} for the trainer's defaults."""
    tables = [
        {"name": t.name, "num_embeddings": t.num_embeddings, "mean_pooling": float(p), "alpha": W_EMB.alpha}
        for t, p in zip(W_EMB.tables, pooling, strict=True)
    ]
    return parse_config(
        {
            "run": {"dir": str(folder), "device": "cpu", "pin_cores": False},
            "data": {
                "source": "synthetic",
                "tables": tables,
                "train_samples": JOB.batch_size * steps_per_epoch,
                "test_samples": 0,
                "reuse_batches": JOB.num_batches,
                "drift": list(drift),
            },
            "tables": {"embedding_dim": W_EMB.dim},
            "model": {"dense_arch_layer_sizes": list(W_EMB.bottom), "over_arch_layer_sizes": list(W_EMB.top)},
            "train": {"batch_size": JOB.batch_size // WORLD_SIZE, "epochs": epochs},
            "checkpoint": {"enabled": False},
            "profile": dict(profile),
            "autoshard": {"enabled": False, "cache_dir": None, **autoshard},
        }
    )


def pooling_at(config: Config, epoch: int, samples: int = 4096) -> list[float]:
    """Each table's mean pooling in the first samples of an epoch."""
    seen = open_source(config.data, config.tables).read("train", epoch, 0, samples)
    return [float(mean) for mean in seen.lengths_TB.double().mean(1)]


def fixed_plan(plan: ShardingPlan, folder: Path) -> dict[str, Any]:
    """`autoshard` settings of a job that keeps this plan."""
    path = folder / f"plan_{plan.fingerprint}.json"
    plan.save(path)
    return {"enabled": False, "placement": str(path)}


def run_jobs(jobs: Sequence[Job], folder: Path) -> dict[str, JobRun]:
    """One after another in the same two processes."""
    on_pinned_ranks(_train_all, WORLD_SIZE, list(jobs), str(folder), timeout=900.0)
    return {job.name: _written(folder / job.name) for job in jobs}


def start_seconds(job: Job, folder: Path) -> float:
    """Until it could train, in processes of its own."""
    on_pinned_ranks(_train_all, WORLD_SIZE, [replace(job, trains=False)], str(folder), timeout=300.0)
    return float((folder / job.name / "start_seconds.txt").read_text())


def _written(run_dir: Path) -> JobRun:
    epochs = tuple(IntervalProfile.from_json(line) for line in read_jsonl(epochs_file(run_dir)))
    decisions = tuple(read_jsonl(run_dir / "decisions.jsonl"))
    return JobRun(epochs, decisions, float((run_dir / "start_seconds.txt").read_text()))


def _train_all(rank: int, world_size: int, jobs: list[Job], folder: str) -> None:
    keep_freed_memory()
    world = dist.group.WORLD
    assert world is not None
    runtime = runtime_of(world, torch.device("cpu"))
    for job in jobs:
        run_dir = Path(folder, job.name)
        if rank == 0:
            run_dir.mkdir(parents=True)
        runtime.barrier()
        with open(run_dir / f"said_{rank}.txt", "w") as said, contextlib.redirect_stdout(said):
            started = time.perf_counter()
            job_trainer = _Trainer(job, runtime, run_dir)
            if rank == 0:
                (run_dir / "start_seconds.txt").write_text(str(time.perf_counter() - started))
            if job.trains:
                job_trainer.run()
            del job_trainer
        gc.collect()


class _Trainer(Trainer):
    """With a busy neighbour on the last rank's core in the epochs that the job names."""

    def __init__(self, job: Job, runtime: Runtime, run_dir: Path) -> None:
        super().__init__(job.config, runtime, run_dir)
        data, here = self.job.data, runtime.rank == runtime.world_size - 1
        batches = data.batches

        @contextlib.contextmanager
        def batches_beside(split: Split, epoch: int, first_sample: int = 0) -> Iterator[Loader]:
            busy = here and split == "train" and epoch in job.busy_epochs
            with busy_neighbour(busy), batches(split, epoch, first_sample) as loader:
                yield loader

        data.batches = batches_beside  # type: ignore[method-assign, assignment]
