"""The limit of a training step: what no trainer with these kernels can go below, and what is spent beside it.

On the slowest rank, the fused lookup forward and backward of its shard for the global batch plus the dense part on its
slice of it, each timed alone: `limits_of(job, None, rank, world_size)["limit"]`, in seconds.
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

STEPS = 5  # of one trainer, before it is the other's turn


def limits_of(job: OurJob, alone: Callable[[], float] | None, rank: int, world_size: int) -> dict[str, Any]:
    """Returns seconds of a round: the "limit" on this rank while the others wait, its "parts", and what `alone` gives.
    Collective."""
    found: dict[str, Any] = {}
    dist.barrier()
    if alone is not None:
        found["alone"] = alone()
    # The limit: one rank after the other, so that each has the machine to itself.
    for turn in range(world_size):
        dist.barrier()
        if turn == rank:
            found["parts"] = limit_parts(job, STEPS)
            found["limit"] = sum(found["parts"])
    return found


def rank_0_alone(workload: Workload, rank: int) -> Callable[[], float]:
    """Seconds a step of a job that rank 0 has to itself; the others wait."""
    if rank != 0:
        make_groups([0])
        return lambda: 0.0
    job = OurJob(workload, workload.plan(1), 0, workload.batches(), ranks=[0])
    job.run(3)
    return lambda: job.run(STEPS) / STEPS


def limit_parts(job: OurJob, rounds: int) -> tuple[float, float, float]:
    """Median seconds of the fused lookup, of its backward with update, and of the dense part forward and backward,
    on the last batch. No collective; the tables and MLPs are trained by it, which changes no speed."""
    batch, ids = job.batches[0], job.ids
    times: tuple[list[float], ...] = ([], [], [])
    gradient = None
    # The dense part finds the vectors where it needs them and leaves their gradients where they are: a step could do
    # without any copy of them between the lookup, the exchange and the interaction, so its limit has none.
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


def idle_step(tables: int, steps: int = 200) -> tuple[float, list[float]]:
    """Seconds of a whole step in which no kernel has anything to do (two samples, tables of dim 4, one id each), and
    of that the bookkeeping: what is left after calling the same kernels alone, by round of ten steps, interleaved with
    the kernels; less than nothing where the two differ by less than the noise. Collective over all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    workload = idle_workload(tables, world_size)
    plan = round_robin([table.name for table in workload.tables], Topology(world_size))
    job = OurJob(workload, plan, rank, workload.batches(rank, world_size))
    job.run(20)
    whole, left = [], []
    for _ in range(max(2, steps // 10)):
        whole.append(statistics.median(job.run(1) for _ in range(10)))
        left.append(whole[-1] - sum(limit_parts(job, 10)))
    return statistics.median(whole), left


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
    """Bytes of one batch on this rank: its tables' ids, and their pooled vectors, for the global batch."""
    ids = job.ids
    bags = ids.batch_size * job.embeddings.world_size
    return ids.values_N.nbytes + 4 * bags * job.embeddings.local_dim
