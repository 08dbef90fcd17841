"""CPU time of the busiest of several ranks under several plans, in one job whose tables move from plan to plan.

seconds = busiest_cpu(workload, {"whole": whole, "rows": ranges}, ranks=4, rounds=8)
seconds["whole"][0]                        # of a step, in the first round
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch.distributed as dist

from dlrm_autoshard.benchmarks.harness import on_pinned_ranks
from dlrm_autoshard.benchmarks.workloads import OurJob, Workload
from dlrm_autoshard.distributed.moves.reshard import reshard
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory
from dlrm_autoshard.plan import ShardingPlan

STEPS, STEPS_TO_SETTLE = 10, 2


def busiest_cpu(
    workload: Workload, plans: Mapping[str, ShardingPlan], ranks: int, rounds: int
) -> dict[str, list[float]]:
    """Returns seconds of a step by plan and round. Ranks may be more than cores: waiting for others costs no CPU, as
    vectors travel by TCP."""
    by_rank = on_pinned_ranks(_rank, ranks, workload, dict(plans), rounds, timeout=900)
    return {name: [max(own) for own in zip(*(seconds[name] for seconds in by_rank), strict=True)] for name in plans}


def _rank(
    rank: int, world_size: int, workload: Workload, plans: dict[str, ShardingPlan], rounds: int
) -> dict[str, list[float]]:
    keep_freed_memory()
    world = dist.group.WORLD
    assert world is not None
    first = next(iter(plans.values()))
    job = OurJob(workload, first, rank, workload.batches(rank, world_size), shared_memory=False)
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(-1, rounds):  # the first is a warm-up
        for name in list(plans) if number % 2 else reversed(plans):
            reshard(job.embeddings, plans[name], group=world)
            job.run(STEPS_TO_SETTLE)
            began = time.process_time()
            job.run(STEPS)
            if number >= 0:
                seconds[name].append((time.process_time() - began) / STEPS)
    return seconds
