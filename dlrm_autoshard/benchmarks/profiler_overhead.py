"""Cost of sampling every 20th step: the same trainer with and without, interleaved, on W-emb.

A sampled step has barriers, marks and no overlap, so it is slower than the others; one in twenty is what the trainer
samples by itself at first, before nothing has changed for long.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from dlrm_autoshard.benchmarks.harness import Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import paired_ratio
from dlrm_autoshard.benchmarks.workloads import W_EMB, OurJob, Workload
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory
from dlrm_autoshard.plan import ShardingPlan

TITLE = "cost of profiling one step in 20: epoch time with and without, in turn"
ROUGH_TIME = "2 to 8 min"
EVERY_STEPS = 20
WITHIN, SECONDS = 0.005, 240


def run(quick: bool) -> dict[str, Any]:
    found = Findings()
    for ranks in (1, 2):
        measured = on_pinned_ranks(_measure, ranks, W_EMB, W_EMB.plan(ranks), 4 if quick else 240)
        percent = paired_ratio(*measured[0]).map(lambda ratio: 100 * (ratio - 1))
        found.put(f"overhead at {ranks} rank{'s' * (ranks > 1)}, percent", percent, "<= 1.0", digits=2)
    found.notes = [f"rounds, in alternating order, until the interval is within +-{WITHIN:.1%} or {SECONDS} s are over"]
    return vars(found)


def _measure(
    rank: int, world_size: int, workload: Workload, plan: ShardingPlan, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds with and without, by round: those of the slowest rank."""
    keep_freed_memory()
    job = OurJob(workload, plan, rank, workload.batches(rank, world_size))
    job.run(10)
    times: dict[int, list[float]] = {0: [], EVERY_STEPS: []}
    deadline = time.monotonic() + SECONDS
    for number in range(rounds):
        for sample_every in sorted(times, reverse=bool(number % 2)):
            dist.barrier()
            # Of all ranks, and known to all: they end together.
            taken = torch.tensor(job.run(EVERY_STEPS, sample_every=sample_every))
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            times[sample_every].append(float(taken))
        over = torch.tensor(float(time.monotonic() > deadline))
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        ratio = paired_ratio(times[EVERY_STEPS], times[0])
        if over or (number >= 9 and ratio.high - ratio.low <= 2 * WITHIN):
            break
    return times[EVERY_STEPS], times[0]
