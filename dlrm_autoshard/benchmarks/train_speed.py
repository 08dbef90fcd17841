"""What train-wemb and train-wsmall share: ours against TorchRec's and against our own limit, at one and two ranks.

Each rank holds both trainers and they run in turn, a few steps each, over the same batches in memory, pinned to a core,
one thread. The limit of a step is what no trainer with these kernels can go below: on the slowest rank, the fused
lookup forward and backward of its shard for the global batch plus the dense part on its slice of it, each timed alone;
in the same rounds, as is the job on one rank that two are compared with: minutes apart the machine is another one.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlrm_autoshard.benchmarks.harness import Ratio, median_with_interval, on_pinned_ranks, paired_ratio
from dlrm_autoshard.benchmarks.peer_torchrec import TorchrecJob, find_torchrec
from dlrm_autoshard.benchmarks.workloads import OurJob, Workload, make_groups
from dlrm_autoshard.distributed.exchange import with_margin, without_margin
from dlrm_autoshard.distributed.runtime import keep_freed_memory
from dlrm_autoshard.distributed.step import share_of_loss
from dlrm_autoshard.plan import ShardingPlan, Topology, round_robin

STEPS = 5  # of one trainer, before it is the other's turn
TARGETS = {
    "1 rank: over torchrec": ">= 1.05",
    "2 ranks over 1": ">= 1.8",
    "1 rank: share of limit": ">= 0.95",
    "2 ranks: share of limit": ">= 0.88",
    "1 rank: bookkeeping ms": "<= 0.5",
    "1 rank: peak memory over tables, in batches": "<= 6",
    "2 ranks: peak memory over tables, in batches": "<= 6",
}


def compare(workload: Workload, targets: dict[str, str], quick: bool) -> dict[str, Any]:
    """The whole benchmark: figures and spread, as the harness takes them."""
    rounds = 4 if quick else 12
    missing = find_torchrec()
    figures: dict[str, Any] = {}
    spread: dict[str, list[float]] = {}
    notes = [] if missing is None else [f"no comparison: {missing}"]
    for ranks in (1, 2):
        plan = workload.plan(ranks)
        measured = on_pinned_ranks(_measure, ranks, workload, plan, rounds, missing is None, quick)
        ours = slowest_rank(measured, "ours")
        put = _Figures(figures, spread, f"{ranks} rank" + "s" * (ranks > 1))
        put("samples/s", median_with_interval([workload.batch_size / s for s in ours]))
        if missing is None:
            theirs = slowest_rank(measured, "theirs")
            put("torchrec samples/s", median_with_interval([workload.batch_size / s for s in theirs]))
            put("over torchrec", paired_ratio(theirs, ours))
        put("share of limit", paired_ratio(slowest_rank(measured, "limit"), ours))
        slowest = max(measured, key=lambda m: statistics.median(m["limit"]))
        figures[f"{put.prefix}: limit ms"] = round(1e3 * statistics.median(slowest["limit"]), 1)
        figures[f"{put.prefix}: slowest rank's lookup, backward, dense ms"] = [
            round(1e3 * statistics.median(part), 1) for part in zip(*slowest["parts"], strict=True)
        ]
        if ranks > 1:
            put("share of limit, all ranks at once", paired_ratio(slowest_rank(measured, "together"), ours))
            scaling = paired_ratio(measured[0]["alone"], ours)
            figures["2 ranks over 1"], spread["2 ranks over 1"] = scaling.median, [scaling.low, scaling.high]
        if ranks == 1:  # with several, it would count the waiting for each other
            figures[f"{put.prefix}: bookkeeping ms"] = round(1e3 * measured[0]["bookkeeping"], 2)
        figures[f"{put.prefix}: peak memory over tables, in batches"] = round(max(m["buffers"] for m in measured), 1)
        if soak := measured[0]["soak"]:
            growth = max(m["growth"] for m in measured)
            figures[f"{put.prefix}: growth over {soak} steps, MiB"] = round(growth / 2**20, 1)
    targets = targets if missing is None else {k: v for k, v in targets.items() if "torchrec" not in k}
    return {"figures": figures, "targets": targets, "spread": spread, "notes": notes}


class _Figures:
    def __init__(self, figures: dict[str, Any], spread: dict[str, list[float]], prefix: str) -> None:
        self._figures, self._spread, self.prefix = figures, spread, prefix

    def __call__(self, name: str, ratio: Ratio) -> None:
        digits = 0 if ratio.median > 100 else 3
        self._figures[f"{self.prefix}: {name}"] = round(ratio.median, digits)
        self._spread[f"{self.prefix}: {name}"] = [round(ratio.low, digits), round(ratio.high, digits)]


def slowest_rank(measured: list[dict[str, Any]], whose: str) -> list[float]:
    """Seconds a step, by round: a round is over when the last rank is through."""
    return [max(seconds) for seconds in zip(*(m[whose] for m in measured), strict=True)]


def _measure(
    rank: int, world_size: int, workload: Workload, plan: ShardingPlan, rounds: int, against: bool, quick: bool
) -> dict[str, Any]:
    keep_freed_memory()
    result: dict[str, Any] = {"bookkeeping": idle_step(len(workload.tables))[1]}  # also loads every library
    batches = workload.batches(rank, world_size)
    before = peak_memory()
    ours = OurJob(workload, plan, rank, batches)
    ours.run(len(batches))
    own = [t for t in workload.tables if plan.rank_of[t.name] == rank]
    state = sum(t.weight_bytes + t.optimizer_bytes("rowwise_adagrad") for t in own)
    result["buffers"] = (peak_memory() - before - state) / batch_bytes(ours)
    warm = peak_memory()
    result["soak"] = 0 if world_size == 1 else 50 if quick else 1000
    ours.run(result["soak"])
    result["growth"] = peak_memory() - warm
    jobs: dict[str, Callable[[], float]] = {"ours": lambda: ours.run(STEPS) / STEPS}
    if against:
        theirs = TorchrecJob(workload, batches)
        theirs.run(3)
        jobs["theirs"] = lambda: theirs.run(STEPS) / STEPS
    if world_size > 1:
        jobs["alone"] = _rank_0_alone(workload, rank)
    result |= {name: [] for name in (*jobs, "parts", "limit", "together")}
    for number in range(-1, rounds):  # the first is a warm-up
        found: dict[str, Any] = {}
        for name, run in jobs.items():
            dist.barrier()
            found[name] = run()
        # The limit: one rank after the other, so that each has the machine to itself.
        for turn in range(world_size):
            dist.barrier()
            if turn == rank:
                found["parts"] = limit_parts(ours, STEPS)
                found["limit"] = sum(found["parts"])
        # And all ranks at once: what sharing caches and memory costs the kernels, whoever calls them.
        dist.barrier()
        found["together"] = sum(limit_parts(ours, STEPS))
        for name, value in found.items():
            if number >= 0:
                result[name].append(value)
    return result


def _rank_0_alone(workload: Workload, rank: int) -> Callable[[], float]:
    """Seconds a step of a job that rank 0 has to itself; the others wait."""
    if rank != 0:
        make_groups([0])
        return lambda: 0.0
    job = OurJob(workload, workload.plan(1), 0, workload.batches(), ranks=[0])
    job.run(3)
    return lambda: job.run(STEPS) / STEPS


def limit_parts(job: OurJob, rounds: int) -> tuple[float, float, float]:
    """Median seconds of the fused lookup, of its backward with update, and of the dense part forward and backward,
    on the batch that waits. No collective; the tables and MLPs are trained by it, which changes no speed."""
    batch, ids = job.batches[0], job.step.ids
    assert ids is not None
    times: tuple[list[float], ...] = ([], [], [])
    gradient = None
    # The dense part takes pooled vectors as a lookup gives them and gives their gradients as an update takes them.
    pooled = torch.randn(batch.padded_size, sum(t.embedding_dim for t in job.embeddings.tables)) * 0.01
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
        leaf = with_margin(pooled, job.model.margin).requires_grad_()
        loss = share_of_loss(job.model.top(job.model.bottom(batch.dense_BF), leaf), batch)
        loss.backward()
        assert leaf.grad is not None
        without_margin(leaf.grad, job.model.margin)
        job.dense.step(0.0)
        marks.append(marks[-1] + time.perf_counter() - started)
        for column, (a, b) in zip(times, itertools.pairwise(marks), strict=True):
            column.append(b - a)
    return statistics.median(times[0]), statistics.median(times[1]), statistics.median(times[2])


def idle_step(tables: int, steps: int = 200) -> tuple[float, float]:
    """Seconds of a whole step in which no kernel has anything to do (two samples, tables of dim 4, one id each), and
    of that the bookkeeping: what is left after calling the same kernels alone. Collective over all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    workload = idle_workload(tables, world_size)
    plan = round_robin([table.name for table in workload.tables], Topology(world_size))
    job = OurJob(workload, plan, rank, workload.batches(rank, world_size))
    job.run(20)
    whole = statistics.median(job.run(1) for _ in range(steps))
    return whole, max(0.0, whole - sum(limit_parts(job, steps)))


def idle_workload(tables: int, world_size: int) -> Workload:
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
    """What one batch takes on this rank: its tables' ids, and their pooled vectors, for the global batch."""
    ids = job.step.ids
    assert ids is not None
    bags = ids.batch_size * job.embeddings.world_size
    return ids.values_N.nbytes + 4 * bags * job.embeddings.local_dim


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
