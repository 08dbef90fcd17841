"""A lookup-heavy job that the loop-* benchmarks run on two pinned ranks, with and without resharding.

runs = run_jobs([Job("static", config), Job("loop", other)], folder)
runs["loop"].throughput(first=2)             # examples/s over epochs 2, 3, ...
runs["loop"].decisions                       # lines of decisions.jsonl
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_autoshard.benchmarks.harness import on_pinned_ranks
from dlrm_autoshard.benchmarks.plans_interleaved import WORLD_SIZE, busy_neighbour
from dlrm_autoshard.benchmarks.workloads import W_EMB
from dlrm_autoshard.config import Config, parse_config
from dlrm_autoshard.data.batch import Batch, DataSource, Split
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.distributed.ranks.runtime import Runtime, keep_freed_memory, runtime_of
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.interval import IntervalProfile, epochs_file
from dlrm_autoshard.records.jsonl import read_jsonl
from dlrm_autoshard.training.trainer import Trainer

JOB = replace(W_EMB, batch_size=1024, num_batches=8)
"""The jobs' workload, on which their plans are interleaved afterwards."""


@dataclass(frozen=True)
class Job:
    """busy_epochs: epochs in which a busy process shares the last rank's core. trains: False only starts the job."""

    name: str
    config: Config
    busy_epochs: tuple[int, ...] = ()
    trains: bool = True


@dataclass(frozen=True)
class JobRun:
    """Records of a job."""

    epochs: tuple[IntervalProfile, ...]
    decisions: tuple[Mapping[str, Any], ...]
    start_seconds: float

    @property
    def final_plan(self) -> ShardingPlan:
        return self.epochs[-1].plan

    def throughput(self, first: int, last: int | None = None) -> float:
        """Returns examples/s over the steps of epochs first to last."""
        chosen = [e for e in self.epochs if e.epoch >= first and (last is None or e.epoch <= last)]
        examples = [(e.end_step - e.first_step) * e.batch_size for e in chosen]
        return sum(examples) / sum(n / e.throughput for n, e in zip(examples, chosen, strict=True))

    @property
    def seconds(self) -> float:
        """Seconds of training alone."""
        return sum((e.end_step - e.first_step) * e.batch_size / e.throughput for e in self.epochs)

    @property
    def stopped_seconds(self) -> float:
        """Seconds for which training stood still, searching and moving."""
        return sum(d["decide_seconds"] + d["move_seconds"] for d in self.decisions)

    @property
    def moves(self) -> int:
        return sum(d["action"] in ("moved", "rolled_back") for d in self.decisions)

    def texts(self, first_epoch: int = 0) -> list[str]:
        """Returns a line a decision, 'step 189: moved 6 tables, ...'."""
        return [f"step {d['step']}: {d['text']}" for d in self.decisions if d["epoch"] >= first_epoch]


def profiling_seconds(epochs: Iterable[IntervalProfile]) -> float:
    """Returns by how many seconds sampled steps, with barriers and no overlap, took longer than the mean step.

    Noise may make it negative.
    """
    seconds = 0.0
    for e in epochs:
        stages = [*e.stage_ms.values(), *e.wait_ms.values()]
        sampled_ms = max((sum(ms) for ms in zip(*stages, strict=True)), default=0.0)
        if e.samples and e.throughput > 0:
            seconds += e.samples * (sampled_ms - 1000 * e.batch_size / e.throughput) / 1000
    return seconds


def settings(
    folder: Path,
    *,
    epochs: int,
    steps_per_epoch: int,
    pooling: Sequence[float] = W_EMB.pooling,
    drift: Sequence[Mapping[str, Any]] = (),
    profile: Mapping[str, Any] | None = None,
    **autoshard: Any,
) -> Config:
    """Returns the config of a job with W-emb's tables and smaller batches. profile: None samples many steps; {} has the
    trainer's defaults."""
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
            "profile": {"every_steps": 4, "warmup_steps": 2} if profile is None else dict(profile),
            "autoshard": {"enabled": False, "cache_dir": None, **autoshard},
        }
    )


def pooling_at(config: Config, epoch: int, samples: int = 4096) -> list[float]:
    """Returns each table's mean pooling in the first samples of an epoch."""
    seen = open_source(config.data, config.tables).read("train", epoch, 0, samples)
    return [float(mean) for mean in seen.lengths_TB.double().mean(1)]


def fixed_plan(plan: ShardingPlan, folder: Path) -> dict[str, Any]:
    """Returns the `autoshard` settings of a job that keeps this plan."""
    path = folder / f"plan_{plan.fingerprint}.json"
    plan.save(path)
    return {"enabled": False, "placement": str(path)}


def run_jobs(jobs: Sequence[Job], folder: Path) -> dict[str, JobRun]:
    """Runs the jobs one after another in the same two processes; returns their records by name."""
    on_pinned_ranks(_rank, WORLD_SIZE, list(jobs), str(folder), timeout=900.0)
    found = {}
    for job in jobs:
        run_dir = folder / job.name
        epochs = tuple(IntervalProfile.from_json(line) for line in read_jsonl(epochs_file(run_dir)))
        decisions, started = read_jsonl(run_dir / "decisions.jsonl"), (run_dir / "start_seconds.txt").read_text()
        found[job.name] = JobRun(epochs, tuple(decisions), float(started))
    return found


def start_seconds(job: Job, folder: Path) -> float:
    """Returns the seconds until a job can train, in processes of its own."""
    on_pinned_ranks(_rank, WORLD_SIZE, [replace(job, trains=False)], str(folder), timeout=300.0)
    return float((folder / job.name / "start_seconds.txt").read_text())


def _rank(rank: int, world_size: int, jobs: list[Job], folder: str) -> None:
    keep_freed_memory()
    world = dist.group.WORLD
    assert world is not None
    runtime = runtime_of(world, torch.device("cpu"))
    for job in jobs:
        run_dir = Path(folder, job.name)
        if rank == 0:
            run_dir.mkdir(parents=True)
        runtime.barrier()
        with trainer_of(job, runtime, run_dir) as trainer:
            if job.trains:
                trainer.run()
            del trainer
        gc.collect()


@contextlib.contextmanager
def trainer_of(job: Job, runtime: Runtime, run_dir: Path) -> Iterator[Trainer]:
    """Yields this rank's trainer of the job, beside the busy process of its busy epochs. Its output goes to a file, and
    its start's seconds to another."""
    busy_here = runtime.rank == runtime.world_size - 1 and bool(job.busy_epochs)
    with (
        open(run_dir / f"said_{runtime.rank}.txt", "w") as said,
        contextlib.redirect_stdout(said),
        busy_neighbour(busy_here) as share_core,
    ):
        started = time.perf_counter()
        source = open_source(job.config.data, job.config.tables)
        if busy_here:
            source = _BesideBusyEpochs(source, job.busy_epochs, share_core)
        trainer = Trainer(job.config, runtime, run_dir, source=source)
        if runtime.rank == 0:
            (run_dir / "start_seconds.txt").write_text(str(time.perf_counter() - started))
        yield trainer


class _BesideBusyEpochs:
    """A source of data that switches a busy neighbour on when it reads batches of certain epochs, else off."""

    def __init__(self, source: DataSource, epochs: Sequence[int], share_core: Callable[[bool], None]) -> None:
        self.tables, self.num_dense, self.reuse_batches = source.tables, source.num_dense, source.reuse_batches
        self._source, self._epochs, self._share_core = source, epochs, share_core

    def num_samples(self, split: Split) -> int:
        return self._source.num_samples(split)

    def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
        self._share_core(split == "train" and epoch in self._epochs)
        return self._source.read(split, epoch, first, last)
