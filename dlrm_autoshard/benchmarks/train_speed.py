"""Compares our trainer with TorchRec and with its own limit, on one and two ranks, for train-wemb and train-wsmall.

Each variant is a job in its own processes, so that one's memory layout does not burden another. They take turns of a
few steps over the same batches in memory, each rank with one thread on its own core, while the others wait. The limit
of a step (train_limits.py) is measured in the same rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dlrm_autoshard.autoshard.intervals import peak_memory
from dlrm_autoshard.benchmarks.harness import Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import Ratio, median_with_interval, paired_ratio
from dlrm_autoshard.benchmarks.peer_torchrec import TorchrecJob, find_torchrec
from dlrm_autoshard.benchmarks.plans_interleaved import best_of
from dlrm_autoshard.benchmarks.steps_interleaved import slowest_rank
from dlrm_autoshard.benchmarks.train_limits import STEPS, batch_bytes, bookkeeping_seconds, limits_of, rank_0_alone
from dlrm_autoshard.benchmarks.workloads import OurJob, Workload
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory
from dlrm_autoshard.plan import ShardingPlan

TARGETS = {
    "1 rank: over torchrec": ">= 1.05",
    "2 ranks: over 1": ">= 1.8",
    "1 rank: share of limit": ">= 0.95",
    "2 ranks: share of limit": ">= 0.88",
    "1 rank: bookkeeping ms": "<= 0.5",
    "1 rank: peak memory over tables, in batches": "<= 6",
    "2 ranks: peak memory over tables, in batches": "<= 6",
}


@dataclass(frozen=True)
class Variant:
    """A job to compare. limits: it measures its limit and memory as well, in the same rounds."""

    ours: bool
    limits: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


OURS = {"ours": Variant(True), "limits": Variant(True, limits=True)}
"""Limits have a process of their own, because measuring them drives a job's rows out of the caches."""
OURS_BY_TCP = {"tcp": Variant(True, options={"shared_memory": False})}
THEIRS = {
    "torchrec": Variant(False),
    "torchrec, ids unchecked": Variant(False, options={"check_ids": False}),
    "torchrec, pipeline": Variant(False, options={"check_ids": False, "pipeline": True}),
}
OUR_PLAN = "torchrec, our plan"


def compare(workload: Workload, targets: dict[str, str], quick: bool) -> dict[str, Any]:
    """Runs the benchmark; without torchrec the targets that need it are missed."""
    rounds, missing = 4 if quick else 12, find_torchrec()
    found = Findings(targets=targets)
    found.notes = [
        "over torchrec: over its fastest variant with its own planner, chosen on other rounds than it is measured on; "
        "over torchrec as it comes: with fbgemm's check of ids in each lookup, which our loader does beside the step",
        *([] if missing is None else [f"no comparison: {missing}"]),
    ]
    for ranks in (1, 2):

        def put(name: str, ratio: Ratio, of: str = f"{ranks} rank" + "s" * (ranks > 1)) -> None:
            found.put(f"{of}: {name}", ratio, digits=0 if ratio.median > 100 else 3)

        plan = workload.plan(ranks)
        variants = OURS | (OURS_BY_TCP if ranks > 1 else {}) | (THEIRS if missing is None else {})
        if missing is None and ranks > 1:
            variants[OUR_PLAN] = Variant(False, options={"check_ids": False, "plan": plan})
        measured = interleaved(workload, plan, variants, ranks, rounds)
        seconds = {name: slowest_rank(by_rank, "seconds") for name, by_rank in measured.items()}
        for name, taken in seconds.items():
            put(f"{name} samples/s", median_with_interval([workload.batch_size / s for s in taken]))
        if missing is None:
            rates = {name: [1 / s for s in seconds[name]] for name in THEIRS}
            fastest, _ = best_of(rates, list(THEIRS))
            theirs = [1 / rate for rate in fastest]
            put("over torchrec", paired_ratio(theirs, seconds["ours"]))
            put("over torchrec as it comes", paired_ratio(seconds["torchrec"], seconds["ours"]))
            if ranks > 1:
                put("tcp, over torchrec", paired_ratio(theirs, seconds["tcp"]))
                put("over torchrec with our plan", paired_ratio(seconds[OUR_PLAN], seconds["ours"]))
        limits = measured["limits"]
        put("share of limit", paired_ratio(slowest_rank(limits, "limit"), seconds["ours"]))
        if ranks > 1:
            put("over 1", paired_ratio(limits[0]["alone"], seconds["ours"]))
        else:  # with several ranks it would count their waiting for each other
            put("bookkeeping ms", limits[0]["bookkeeping"])
        found.figures |= {f"{ranks} rank{'s' * (ranks > 1)}: {name}": value for name, value in _plain(limits).items()}
    return vars(found)


def _plain(limits: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures that have no interval."""
    slowest = max(limits, key=lambda m: statistics.median(m["limit"]))
    return {
        "limit ms": round(1e3 * statistics.median(slowest["limit"]), 1),
        "slowest rank's lookup, backward, dense ms": [
            round(1e3 * statistics.median(part), 1) for part in zip(*slowest["parts"], strict=True)
        ],
        "peak memory over tables, in batches": round(max(m["buffers"] for m in limits), 1),
    }


def interleaved(
    workload: Workload, plan: ShardingPlan, variants: Mapping[str, Variant], ranks: int, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Returns what `_measure` finds, by variant and rank. Every other round is in the opposite order."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    orders = [list(variants) if number % 2 else list(reversed(list(variants))) for number in range(rounds + 1)]
    turns = {name: [len(variants) * n + order.index(name) for n, order in enumerate(orders)] for name in variants}
    store.set("turn 0", "")

    def ranks_of(name: str) -> list[dict[str, Any]]:
        try:
            return on_pinned_ranks(_measure, ranks, workload, plan, variants[name], store.port, turns[name])
        except BaseException:
            for turn in turns[name]:  # the others go on; the failure is reported at the end
                store.set(f"turn {turn + 1}", "")
            raise

    with ThreadPoolExecutor(len(variants)) as threads:
        return dict(zip(variants, threads.map(ranks_of, variants), strict=True))


def _measure(
    rank: int,
    world_size: int,
    workload: Workload,
    plan: ShardingPlan,
    variant: Variant,
    port: int,
    turns: list[int],
) -> dict[str, Any]:
    """Returns one rank's seconds a step by round, and its limits. The first turn is a warm-up."""
    keep_freed_memory()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    batches = workload.batches(rank, world_size)
    result: dict[str, Any] = {name: [] for name in ("seconds", "parts", "limit", "alone")}
    job: OurJob | TorchrecJob | None = None
    alone: Callable[[], float] | None = None
    for turn in turns:
        store.wait([f"turn {turn}"], timedelta(seconds=600))
        dist.barrier()
        if job is None:  # made in its own turn: others are measured at other times
            job, alone = _start(rank, world_size, workload, plan, variant, batches, result)
        found: dict[str, Any] = {"seconds": job.run(STEPS) / STEPS}
        if variant.limits:
            assert isinstance(job, OurJob)
            found |= limits_of(job, alone, rank, world_size)
        for name, value in found.items():
            if turn != turns[0]:
                result[name].append(value)
        dist.barrier()
        if rank == 0:
            store.set(f"turn {turn + 1}", "")
    return result


def _start(
    rank: int,
    world_size: int,
    workload: Workload,
    plan: ShardingPlan,
    variant: Variant,
    batches: list[Batch],
    result: dict[str, Any],
) -> tuple[OurJob | TorchrecJob, Callable[[], float] | None]:
    if not variant.ours:
        theirs = TorchrecJob(workload, batches, **variant.options)
        theirs.run(3)
        return theirs, None
    if variant.limits:
        result["bookkeeping"] = median_with_interval([1e3 * s for s in bookkeeping_seconds(len(workload.tables))])
    cpu = torch.device("cpu")
    before = peak_memory(cpu)
    ours = OurJob(workload, plan, rank, batches, **variant.options)
    ours.run(len(batches))
    if not variant.limits:
        return ours, None
    own = [t for t in workload.tables if plan.rank_of[t.name] == rank]
    state = sum(t.weight_bytes + t.optimizer_bytes("rowwise_adagrad") for t in own)
    result["buffers"] = (peak_memory(cpu) - before - state) / batch_bytes(ours)
    return ours, rank_0_alone(workload, rank) if world_size > 1 else None
