"""Five small tables and MLPs for `OurJob` inside ranks that `run_ranks` has started, and the state after training.

job = OurJob(SMALL, plan_of("01101", world_size), rank, SMALL.batches(rank, world_size))
trained(job, losses)                       # {"losses": ..., "dense": ..., "t_cat_0.weight": ...}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dlrm_autoshard.benchmarks.workloads import W_EMB, OurJob
from dlrm_autoshard.plan import ShardingPlan

SMALL = replace(
    W_EMB,
    rows=(50, 300, 7, 1000, 20),
    pooling=(2.0, 0.5, 3.0, 1.0, 4.0),
    batch_size=24,
    num_batches=3,
    dim=8,
    bottom=(8,),
    top=(16, 1),
)


def plan_of(ranks: str, world_size: int) -> ShardingPlan:
    """Returns a plan. ranks: a digit for each table's rank."""
    return ShardingPlan({t.name: int(r) for t, r in zip(SMALL.tables, ranks, strict=True)}, world_size)


def trained(job: OurJob, losses: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns losses, dense weights, and this rank's tables as they are now."""
    result = {"losses": torch.stack(list(losses)), "dense": job.dense.flat.detach().clone()}
    for name in job.embeddings.plan.shards_on(job.embeddings.rank):
        result |= {f"{name}.{key}": value.clone() for key, value in job.embeddings.storage.tensors(name).items()}
    return result
