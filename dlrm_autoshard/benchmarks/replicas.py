"""Small tables on every rank (`tables.replicate: auto`) against each table at its owner, on a job like Criteo's Kaggle.

26 tables with its rows (of the large ones the first 100,000), one id each, dim 64, 2,048 samples on each of two ranks,
through shared memory and TCP. The embedding part alone, where copies sum their gradients by themselves; then whole
steps, where these travel with the dense part's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dlrm_autoshard.benchmarks.harness import Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import paired_ratio
from dlrm_autoshard.benchmarks.train_speed import slowest_rank
from dlrm_autoshard.benchmarks.workloads import TABLE_LR, OurJob, Workload, make_groups
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
STEPS = 5  # of one, before it is the other's turn
LARGEST = 100_000
KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
KAGGLE = Workload(
    "Kaggle",
    tuple(min(rows, LARGEST) for rows in KAGGLE_ROWS),
    (1,) * 26,
    bottom=(64,),
    top=(64, 1),
    num_batches=10,
    batch_size=4096,
)
LARGE_MLPS = replace(KAGGLE, bottom=(512, 256, 64), top=(512, 256, 1))
PARTS = {  # what is timed: (in words, target through shared memory, by TCP)
    "embeddings": ("lookup, exchange and update", ">= 1.25", ">= 1.35"),
    "small": ("whole step, MLPs [64], [64, 1]", ">= 1.10", None),
    "large": ("whole step, MLPs [512, 256, 64], [512, 256, 1]", ">= 1.02", None),
}


def run(quick: bool) -> dict[str, Any]:
    found = Findings()
    for link in ("shared memory", "TCP"):
        ranks = on_pinned_ranks(_interleaved, 2, link == "shared memory", 6 if quick else 24)
        for part, (words, target, by_tcp) in PARTS.items():
            for what, end in (("speed, auto over none", ""), ("CPU time, none over auto", " cpu")):
                none, auto = (slowest_rank(ranks, f"{part} {asked}{end}") for asked in ("none", "auto"))
                aimed = (target if link == "shared memory" else by_tcp) if not end else None
                found.put(f"{words}, {link}: {what}", paired_ratio(none, auto), aimed, digits=3)
    found.notes.append(f"On every rank: {len(_replicated('auto', 2))} of {len(KAGGLE.tables)} tables.")
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
    """Our planner's, of the tables that are not replicated."""
    replicated = _replicated(asked, world_size)
    placed = [(t, s) for t, s in zip(KAGGLE.tables, KAGGLE.stats(), strict=True) if t.name not in replicated]
    tables, stats = [table for table, _ in placed], [stat for _, stat in placed]
    task = PlacementTask.build(tables, stats, Topology(world_size), batch_size=KAGGLE.batch_size)
    return Planner("auto").plan(task).plan


def _embedding_part(
    asked: str, rank: int, world_size: int, batches: list[Batch], shared_memory: bool
) -> Callable[[], None]:
    """Returns steps without a dense part: the gradient is given."""
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

    def steps() -> None:
        for _ in range(STEPS):
            bags.look_up(SentIds(next(turns), embeddings)).wait().backward(gradient_BD)

    return steps


def _interleaved(rank: int, world_size: int, shared_memory: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step by round, on the wall and of this process's CPU."""
    keep_freed_memory()
    batches, variants = KAGGLE.batches(rank, world_size), dict[str, Callable[[], object]]()
    for asked in ("none", "auto"):
        variants[f"embeddings {asked}"] = _embedding_part(asked, rank, world_size, batches, shared_memory)
        for name, workload in (("small", KAGGLE), ("large", LARGE_MLPS)):
            plan, replicated = _plan(asked, world_size), _replicated(asked, world_size)
            job = OurJob(workload, plan, rank, batches, shared_memory=shared_memory, replicated=replicated)
            variants[f"{name} {asked}"] = lambda job=job: job.run(STEPS)  # type: ignore[misc]
    found: dict[str, list[float]] = {f"{variant}{end}": [] for variant in variants for end in ("", " cpu")}
    for number in range(rounds + 1):
        for part in PARTS:
            for asked in ("none", "auto") if number % 2 else ("auto", "none"):
                dist.barrier()
                started, cpu = time.perf_counter(), time.process_time()
                variants[f"{part} {asked}"]()
                if number:
                    found[f"{part} {asked}"].append((time.perf_counter() - started) / STEPS)
                    found[f"{part} {asked} cpu"].append((time.process_time() - cpu) / STEPS)
    return found
