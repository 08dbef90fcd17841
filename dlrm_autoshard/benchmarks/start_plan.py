"""How long planning takes at the start of a job of 50 tables on two real ranks: cold, and from costs of an earlier job.

As jobs call it (`autoshard.initial_plan.place`), each start in processes of its own: ranks' memory and hosts, measuring
tables alone and sets of them, fitting, planning, finalists measured where that pays. Warm: another job with the same
tables, whose `autoshard.cache_dir` the cold one has filled.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from dlrm_autoshard.autoshard.initial_plan import place
from dlrm_autoshard.benchmarks.harness import Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import median_with_interval
from dlrm_autoshard.benchmarks.plans_interleaved import WORLD_SIZE
from dlrm_autoshard.config import AutoshardConfig, ExchangeDtypes, TableOptimizerConfig
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory, runtime_of
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool

TITLE = "planning at the start of a 50-table job on two ranks: cold, and where costs are cached"
ROUGH_TIME = "2 min"

TABLES, BATCH, EPOCHS, EPOCH_STEPS = 50, 4096, 10, 400
JOBS = {"resharding on": True, "resharding off": False}
"""Off, the first plan serves for the whole job, and more is measured for it."""


def run(quick: bool) -> dict[str, Any]:
    found = Findings()
    for words, reshards in JOBS.items():
        cold, warm, alone = list[float](), list[float](), list[int]()
        for _ in range(1 if quick else 6):
            with tempfile.TemporaryDirectory() as cache:
                starts = [on_pinned_ranks(_start, WORLD_SIZE, cache, reshards, timeout=120.0)[0] for _ in range(2)]
            (first, measured), (second, _) = starts
            cold.append(first)
            warm.append(second)
            alone.append(measured)
        found.put(f"{words}: cold, s", median_with_interval(cold), "<= 5")
        found.put(f"{words}: warm, s", median_with_interval(warm), "<= 1")
        found.put(f"{words}: tables measured alone, of {TABLES}", min(alone), f">= {TABLES}" if not reshards else None)
    found.notes = [
        f"a job of {EPOCHS} epochs of {EPOCH_STEPS} steps, global batch {BATCH}; all of `place`, from which a job has "
        "its plan on every rank. Tables measured alone: in the start that measured fewest.",
        "Finalists were measured in each such start until c57e1c7: 4.0 s cold, 2.2 s warm.",
        "resharding on: the plan serves until the first decision, after an epoch, and measuring must pay within it.",
    ]
    return vars(found)


def _start(rank: int, world_size: int, cache: str, reshards: bool) -> tuple[float, int]:
    """Seconds until the plan is here; on rank 0 how many tables its costs know by themselves."""
    keep_freed_memory()
    group = dist.group.WORLD
    assert group is not None
    pool = synthetic_pool(TABLES, seed=TABLES, batch_size=BATCH)
    settings = AutoshardConfig.model_validate({"enabled": True, "cache_dir": cache, "reshard": {"enabled": reshards}})
    runtime = runtime_of(group, torch.device("cpu"))
    runtime.barrier()
    begun = time.perf_counter()
    placement = place(
        settings,
        runtime,
        pool.tables,
        lambda: pool.stats,
        batch_size=BATCH,
        optimizer=TableOptimizerConfig(),
        exchange_dtype=ExchangeDtypes(),
        steps=EPOCHS * EPOCH_STEPS,
        interval_steps=EPOCH_STEPS,
    )
    taken = time.perf_counter() - begun
    known = [] if placement.planner is None else placement.planner.costs.replay.shards
    alone = {shard.tables[0].name for shard in known if len(shard.tables) == 1}
    return taken, len(alone & {table.name for table in pool.tables})
