"""Measures the limit of a training step, which no trainer with these kernels can beat, and bookkeeping beside it.

The limit is the fused lookup, forward and backward, of the slowest rank's shard for the global batch, plus the dense
part on that rank's slice, each timed alone: `limits_of(job, None, rank, world_size)["limit"]`, in seconds.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlrm_autoshard.benchmarks.workloads import OurJob, Workload, make_groups
from dlrm_autoshard.distributed.lookup.exchange import with_margin
from dlrm_autoshard.distributed.step import share_of_loss
from dlrm_autoshard.plan import Topology, round_robin

STEPS = 5  # of a variant before the next one's turn


def limits_of(job: OurJob, alone: Callable[[], float] | None, rank: int, world_size: int) -> dict[str, Any]:
    """Returns seconds of a round: the "limit" on this rank while the others wait, its "parts", and those of `alone`.
    Collective."""
    found: dict[str, Any] = {}
    dist.barrier()
    if alone is not None:
        found["alone"] = alone()
    # One rank after the other, so that each has the machine to itself.
    for turn in range(world_size):
        dist.barrier()
        if turn == rank:
            found["parts"] = limit_parts(job, STEPS)
            found["limit"] = sum(found["parts"])
    return found


def rank_0_alone(workload: Workload, rank: int) -> Callable[[], float]:
    """Returns a function that measures seconds a step of a job on rank 0 alone, while the others wait."""
    if rank != 0:
        make_groups([0])
        return lambda: 0.0
    job = OurJob(workload, workload.plan(1), 0, workload.batches(), ranks=[0])
    job.run(3)
    return lambda: job.run(STEPS) / STEPS


def limit_parts(job: OurJob, rounds: int) -> tuple[float, float, float]:
    """Returns median seconds of the fused lookup, of its backward with the update, and of the dense part, forward and
    backward, on the last batch. Not collective. It trains the tables and MLPs, which changes no speed."""
    batch, ids = job.batches[0], job.ids
    times: tuple[list[float], ...] = ([], [], [])
    gradient = None
    # The limit has no copies of vectors and gradients between lookup, exchange and interaction: a step needs none.
    pooled = torch.randn(batch.padded_size, sum(t.embedding_dim for t in job.embeddings.tables)) * 0.01
    leaf = with_margin(pooled, job.model.margin).requires_grad_()
    for _ in range(rounds):
        marks = [time.perf_counter()]
        local = job.embeddings.lookup(ids)
        marks.append(time.perf_counter())
        gradient = torch.full_like(local, 1e-6) if gradient is None else gradient
        started = time.perf_counter()
        job.embeddings.update(local, gradient)
        marks.append(marks[-1] + time.perf_counter() - started)
        started = time.perf_counter()
        job.dense.zero_gradient()
        leaf.grad = None
        loss = share_of_loss(job.model.top(job.model.bottom(batch.dense_BF), leaf), batch)
        loss.backward()
        job.dense.update(0.0)
        marks.append(marks[-1] + time.perf_counter() - started)
        for column, (a, b) in zip(times, itertools.pairwise(marks), strict=True):
            column.append(b - a)
    return statistics.median(times[0]), statistics.median(times[1]), statistics.median(times[2])


def bookkeeping_seconds(tables: int, rounds: int = 20) -> list[float]:
    """Returns the seconds of a step that are left after calling the same kernels alone, by round of ten steps.

    The kernels have nothing to do: two samples, tables of dim 4, one id each. Noise may make a figure negative.
    Collective over all ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    workload = idle_workload(tables, world_size)
    plan = round_robin([table.name for table in workload.tables], Topology(world_size))
    job = OurJob(workload, plan, rank, workload.batches(rank, world_size))
    job.run(20)
    return [statistics.median(job.run(1) for _ in range(10)) - sum(limit_parts(job, 10)) for _ in range(rounds)]


def idle_workload(tables: int, world_size: int) -> Workload:
    """Returns a workload whose kernels have nothing to do: eight rows a table, one id, two samples a rank."""
    return Workload(
        "idle",
        rows=(8,) * tables,
        pooling=(1,) * tables,
        bottom=(4,),
        top=(1,),
        num_batches=2,
        dim=4,
        batch_size=2 * world_size,
        interaction="cat",
    )


def batch_bytes(job: OurJob) -> int:
    """Returns the bytes of a batch on this rank: ids and pooled vectors of its tables for the global batch."""
    ids = job.ids
    bags = ids.batch_size * job.embeddings.world_size
    return ids.values_N.nbytes + 4 * bags * job.embeddings.local_dim
