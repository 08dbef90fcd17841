"""Two hosts of two ranks with a slow link between them: a step, and bytes between the hosts, by what travels how.

The hosts are network namespaces of this machine, the link is a veth pair limited by `tc`. Four ranks share this
machine's cores, so the job is one that the link bounds: 24 tables of dim 64, one id a sample, 512 samples a rank, and
small MLPs; dense gradients are those of larger ones. All variants train in the same four ranks, a few steps at a time.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dlrm_autoshard.benchmarks.harness import BenchError, Findings
from dlrm_autoshard.benchmarks.paired import median_with_interval, paired_ratio
from dlrm_autoshard.benchmarks.slow_link import DEVICE, cannot_make_link, slow_link
from dlrm_autoshard.benchmarks.workloads import KAGGLE_ROWS, OurJob, Workload
from dlrm_autoshard.config import ExchangeDtypes
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.ranks.groups import new_group
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory
from dlrm_autoshard.distributed.sums import in_one_ring
from dlrm_autoshard.plan import ShardingPlan

TITLE = "two hosts with a slow link between them: a step, and bytes between the hosts, by how vectors and ids travel"
ROUGH_TIME = "3 min"
HOSTS = (0, 0, 1, 1)
STEPS, STEPS_OF_LARGE_BATCHES = 3, 2  # of one variant, before it is the next one's turn
ROUNDS = {1: 10, 10: 7}
"""By the link's Gbit/s. Targets are for the slower link."""
WORKLOAD = Workload(
    "two hosts",
    tuple(int(1000 * 10 ** (i / 8)) for i in range(24)),
    (1.0,) * 24,
    bottom=(64,),
    top=(16, 1),
    num_batches=6,
)
KAGGLE = replace(
    WORKLOAD,
    rows=tuple(min(rows, 10**6) for rows in KAGGLE_ROWS),
    pooling=(1.0,) * len(KAGGLE_ROWS),
    batch_size=8192,
)
LARGE_MLPS = replace(WORKLOAD, bottom=(512, 256, 64), top=(512, 256, 1))


@dataclass(frozen=True)
class Variant:
    """dtypes: exchange_dtype's. than: the variants that it is compared with, and the target at 1 Gbit/s."""

    dtypes: str | dict[str, str]
    than: Mapping[str, str | None]
    packs_ids: bool | None = None  # None: by the measured link
    in_one_ring: bool = False
    workload: Workload = WORKLOAD
    dedup: bool = False

    @property
    def steps(self) -> int:
        return STEPS if self.workload.batch_size <= WORKLOAD.batch_size else STEPS_OF_LARGE_BATCHES

    def job(self, rank: int, world_size: int, batches: list[Batch]) -> OurJob:
        owners = {table.name: number % world_size for number, table in enumerate(self.workload.tables)}
        plan = ShardingPlan(owners, world_size)
        dtypes = ExchangeDtypes.model_validate(self.dtypes)
        once = [table.name for table in self.workload.tables if self.dedup]
        job = OurJob(self.workload, plan, rank, batches, exchange_dtype=dtypes, dedup=once)
        if self.packs_ids is False:
            job.embeddings.exchange.packing = None
        if self.in_one_ring:
            job.dense._sum = in_one_ring(new_group())
        return job


FP32, FP16, RING = "fp32, ids as int32", "fp16, ids as int32", "large MLPs, int8, dense gradients in one ring"
KAGGLE_FP16, KAGGLE_INT8 = (f"Kaggle's rows, 2,048 samples a rank, {dtype}" for dtype in ("fp16", "int8"))
VARIANTS = {
    FP32: Variant("fp32", {}, packs_ids=False),
    FP16: Variant("fp16", {FP32: None}, packs_ids=False),
    "fp16": Variant("fp16", {FP32: None, FP16: None}),
    "int8, gradients fp16": Variant({"vectors": "int8", "gradients": "fp16"}, {FP32: None, FP16: None}),
    "int8": Variant("int8", {FP32: ">= 2.0", FP16: ">= 1.3"}),
    "fp16, each id once": Variant("fp16", {FP32: None, FP16: None, "int8": None}, dedup=True),
    "int8, each id once": Variant("int8", {FP32: None, FP16: None, "int8": None}, dedup=True),
    KAGGLE_FP16: Variant("fp16", {}, workload=KAGGLE),
    KAGGLE_INT8: Variant("int8", {KAGGLE_FP16: None}, workload=KAGGLE),
    f"{KAGGLE_FP16}, each id once": Variant(
        "fp16", {KAGGLE_FP16: ">= 1.3", KAGGLE_INT8: ">= 1.15"}, workload=KAGGLE, dedup=True
    ),
    f"{KAGGLE_INT8}, each id once": Variant(
        "int8", {KAGGLE_FP16: None, KAGGLE_INT8: None}, workload=KAGGLE, dedup=True
    ),
    RING: Variant("int8", {}, in_one_ring=True, workload=LARGE_MLPS),
    "large MLPs, int8, dense gradients by host": Variant("int8", {RING: None}, workload=LARGE_MLPS),
}


def run(quick: bool) -> dict[str, Any]:
    why_not = cannot_make_link()
    if why_not is not None:
        raise BenchError(f"bench hosts makes two hosts of this machine, and cannot: {why_not}")
    found = Findings()
    for gbit in (1,) if quick else ROUNDS:
        with slow_link(1000 * gbit, 0, both_ways=True) as link, tempfile.TemporaryDirectory() as folder:
            out, rounds = Path(folder) / "found.json", 6 if quick else ROUNDS[gbit]
            command = [sys.executable, "-m", "dlrm_autoshard.benchmarks.hosts", str(out), str(rounds)]
            link.run(command, HOSTS, timeout=300)
            put(found, f"{gbit} Gbit/s", json.loads(out.read_text()), targets=gbit == 1)
        found.notes.append(f"{gbit} Gbit/s: {link.made_by}; hosts {HOSTS}, by rank.")
    return vars(found)


def put(found: Findings, link: str, by_variant: dict[str, dict[str, list[float]]], *, targets: bool) -> None:
    """by_variant: rank 0's seconds and CPU seconds a step, and bytes that leave its host in a step, by round."""
    for name, measured in by_variant.items():
        found.put(f"{link}, {name}: a step, ms", median_with_interval([1e3 * s for s in measured["seconds"]]), digits=1)
        found.put(f"{link}, {name}: CPU of a rank in a step, ms", 1e3 * statistics.median(measured["cpu"]), digits=1)
        found.put(f"{link}, {name}: MB out of a host in a step", measured["bytes"][-1] / 1e6, digits=2)
        for than, target in VARIANTS[name].than.items():
            ratio = paired_ratio(by_variant[than]["seconds"], measured["seconds"])
            found.put(f"{link}, {name}: steps as fast as {than}", ratio, target if targets else None, digits=2)
        for than in [*VARIANTS[name].than][:1]:
            of = round(measured["bytes"][-1] / by_variant[than]["bytes"][-1], 3)
            wanted = "<= 0.28" if targets and name == "int8" else None
            found.put(f"{link}, {name}: bytes of {than}'s", of, wanted)


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """On each rank; bytes are its own host's."""
    keep_freed_memory()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    workloads = dict.fromkeys(variant.workload for variant in VARIANTS.values())
    batches = {workload: workload.batches(rank, world_size) for workload in workloads}
    jobs = {name: variant.job(rank, world_size, batches[variant.workload]) for name, variant in VARIANTS.items()}
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "cpu": [], "bytes": []} for name in jobs}
    for number in range(rounds + 1):
        for name in jobs if number % 2 else reversed(jobs):
            dist.barrier()
            before, started, cpu = bytes_out(), time.perf_counter(), time.process_time()
            jobs[name].run(steps := VARIANTS[name].steps)
            cpu = time.process_time() - cpu
            dist.barrier()
            if number:
                found[name]["cpu"].append(cpu / steps)
                found[name]["seconds"].append((time.perf_counter() - started) / steps)
                found[name]["bytes"].append((bytes_out() - before) / steps)
    return found


def bytes_out() -> int:
    """Bytes that this host has sent over the link, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == DEVICE:
            return int(counters.split()[8])
    raise BenchError(f"this namespace has no link {DEVICE}.")


def main(out: Path, rounds: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    dist.init_process_group("gloo")
    found = measure(rounds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
