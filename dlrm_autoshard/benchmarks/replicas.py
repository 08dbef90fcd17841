"""Small tables on every rank (`tables.replicate: auto`) against each table at its owner, on a job shaped like Kaggle's.

26 tables with Criteo-Kaggle's rows (at most 100,000), one id each, dim 64, 2,048 samples on each of two ranks, over
shared memory and TCP. The embedding part alone, where replicas sum their gradients themselves, and whole steps, where
these travel with the dense part's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dlrm_autoshard.benchmarks.harness import Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import paired_ratio
from dlrm_autoshard.benchmarks.steps_interleaved import interleaved, slowest_rank
from dlrm_autoshard.benchmarks.workloads import KAGGLE_ROWS, TABLE_LR, OurJob, Workload, make_groups
from dlrm_autoshard.config import TableOptimizerConfig, TablesConfig
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.lookups import EmbeddingBags, SentIds
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.plan.replicated import replicated_tables
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask

TITLE = "small tables on every rank, against each at its owner: the embedding part and whole steps"
ROUGH_TIME = "4 min"
STEPS = 5  # of a variant before the next one's turn
KAGGLE = Workload(
    "Kaggle",
    tuple(min(rows, 100_000) for rows in KAGGLE_ROWS),
    (1,) * len(KAGGLE_ROWS),
    bottom=(64,),
    top=(64, 1),
    num_batches=10,
    batch_size=4096,
)
JOBS = {"small": KAGGLE, "large": replace(KAGGLE, bottom=(512, 256, 64), top=(512, 256, 1))}
PARTS = {  # what is timed: (in words, target over shared memory, over TCP)
    "embeddings": ("lookup, exchange and update", ">= 1.25", ">= 1.35"),
    "small": ("whole step, MLPs [64], [64, 1]", ">= 1.10", None),
    "large": ("whole step, MLPs [512, 256, 64], [512, 256, 1]", ">= 1.02", None),
}


def run(quick: bool) -> dict[str, Any]:
    found = Findings()
    for link in ("shared memory", "TCP"):
        ranks = on_pinned_ranks(_rank, 2, link == "shared memory", 6 if quick else 24)
        for part, (words, shared_target, tcp_target) in PARTS.items():
            for what, end in (("speed, auto over none", ""), ("CPU time, none over auto", " cpu")):
                none, auto = (slowest_rank(ranks, f"{part} {asked}{end}") for asked in ("none", "auto"))
                target = (shared_target if link == "shared memory" else tcp_target) if not end else None
                found.put(f"{words}, {link}: {what}", paired_ratio(none, auto), target, digits=3)
    found.notes.append(f"on every rank: {len(_replicated('auto', 2))} of {len(KAGGLE.tables)} tables")
    return vars(found)


def _replicated(asked: str, world_size: int) -> tuple[str, ...]:
    return replicated_tables(
        asked,
        KAGGLE.tables,
        features={table.name: 1 for table in KAGGLE.tables},
        batch_size=KAGGLE.batch_size // world_size,
        world_size=world_size,
        exchange_bytes=8,
        optimizer=KAGGLE.optimizer,
    )


def _plan(asked: str, world_size: int) -> ShardingPlan:
    """Returns our planner's plan of the tables that are not replicated."""
    replicated = _replicated(asked, world_size)
    placed = [(t, s) for t, s in zip(KAGGLE.tables, KAGGLE.stats(), strict=True) if t.name not in replicated]
    tables, stats = [table for table, _ in placed], [stat for _, stat in placed]
    task = PlacementTask.build(tables, stats, Topology(world_size), batch_size=KAGGLE.batch_size)
    return Planner("auto").plan(task).plan


def _embedding_step(
    asked: str, rank: int, world_size: int, batches: list[Batch], shared_memory: bool
) -> Callable[[], None]:
    """Returns a step without a dense part: the gradient is given."""
    group, id_group, control = make_groups()
    embeddings = ShardedEmbeddings(
        KAGGLE.tables,
        _plan(asked, world_size),
        TablesConfig(optimizer=TableOptimizerConfig(name=KAGGLE.optimizer, lr=TABLE_LR)),
        rank=rank,
        group=group,
        id_group=id_group,
        device=torch.device("cpu"),
        shared_memory=shared_memory,
        replicated=_replicated(asked, world_size),
    )
    bags = EmbeddingBags(embeddings, StageClock(torch.device("cpu"), control), average=False)
    turns, gradient_BD = itertools.cycle(batches), 1e-3 * torch.randn(batches[0].size, KAGGLE.dim * len(KAGGLE.tables))

    def step() -> None:
        bags.look_up(SentIds(next(turns), embeddings)).wait().backward(gradient_BD)

    return step


def _rank(rank: int, world_size: int, shared_memory: bool, rounds: int) -> dict[str, list[float]]:
    keep_freed_memory()
    batches, steps = KAGGLE.batches(rank, world_size), dict[str, Callable[[], object]]()
    for asked in ("none", "auto"):
        steps[f"embeddings {asked}"] = _embedding_step(asked, rank, world_size, batches, shared_memory)
        for name, workload in JOBS.items():
            plan, replicated = _plan(asked, world_size), _replicated(asked, world_size)
            job = OurJob(workload, plan, rank, batches, shared_memory=shared_memory, replicated=replicated)
            steps[f"{name} {asked}"] = lambda job=job: job.run(1)  # type: ignore[misc]
    by_part = {name: steps[name] for part in PARTS for name in (f"{part} none", f"{part} auto")}
    return interleaved(by_part, turn=STEPS, rounds=rounds)
