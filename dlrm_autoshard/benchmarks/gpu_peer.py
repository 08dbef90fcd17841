"""Sections of `bench gpu-all` that time steps: against TorchRec, between our own settings, and stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from dlrm_autoshard.benchmarks.paired import Ratio, alternate, median_with_interval, paired_ratio
from dlrm_autoshard.benchmarks.peer_torchrec import TorchrecJob, find_torchrec
from dlrm_autoshard.benchmarks.plans_interleaved import best_of
from dlrm_autoshard.benchmarks.train_speed import THEIRS, Variant
from dlrm_autoshard.benchmarks.workloads import W_EMB, W_SMALL, OurJob, Workload
from dlrm_autoshard.probe.shard_probe import ShardProbe, now

STEPS, ROUNDS = 20, 12
WORKLOADS = {
    name: replace(workload, batch_size=16_384, num_batches=3)
    for name, workload in (("w_small", W_SMALL), ("w_emb", W_EMB))
}


def peer(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """Compares us with TorchRec on W-emb and W-small with a GPU's batch size, from pinned memory, over nccl."""
    device = _join()
    found["spread"] = {}
    if missing := find_torchrec():
        found["torchrec"] = f"no comparison: {missing}"
    for name, workload in WORKLOADS.items():
        variants = _jobs(workload, {} if missing else THEIRS, device)
        taken = dict(zip(variants, alternate(*variants.values(), rounds=ROUNDS), strict=True))
        del variants
        torch.cuda.empty_cache()
        for variant, times in taken.items():
            rates = [STEPS * workload.batch_size / s for s in times]
            _put(found, f"{name}: {variant} samples/s", median_with_interval(rates))
        if not missing:
            for variant in THEIRS:
                _put(found, f"{name}: over {variant}", paired_ratio(taken[variant], taken["ours"]))
            fastest, _ = best_of({variant: [1 / s for s in taken[variant]] for variant in THEIRS}, list(THEIRS))
            over = paired_ratio([1 / rate for rate in fastest], taken["ours"])
            _put(found, f"{name}: over the fastest of them", over)
    dist.destroy_process_group()


def variants(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """Measures speed over that of fp32 with tables on the device: with tf32 and bf16, without CUDA graphs, and with
    tables in host memory behind a cache of a fifth of the rows."""
    device = _join()
    found["spread"] = {}
    for name, workload in WORKLOADS.items():
        batches = [batch.pinned() for batch in workload.batches()]
        plan = workload.plan(1)
        kinds: dict[str, dict[str, Any]] = {
            "fp32": {},
            "tf32": {},
            "bf16": {"autocast": True},
            "launched one by one": {"graphs": False},
            "managed_caching": {"location": "managed_caching"},
        }
        jobs = {kind: OurJob(workload, plan, 0, batches, device=device, **options) for kind, options in kinds.items()}
        turns = [_turn(job, device, tf32=kind == "tf32") for kind, job in jobs.items()]
        taken = dict(zip(jobs, alternate(*turns, rounds=ROUNDS), strict=True))
        for kind in list(kinds)[1:]:
            _put(found, f"{name}: {kind} over fp32", paired_ratio(taken["fp32"], taken[kind]))
        del jobs, turns
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def stages(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """Measures stages of real steps, the planner's probe of the same stages on throwaway tables, and the share of the
    time of copies to the device in which kernels run."""
    device = _join()
    for name, workload in WORKLOADS.items():
        job = OurJob(workload, workload.plan(1), 0, [batch.pinned() for batch in workload.batches()], device=device)
        job.run(STEPS)
        job.run(2 * STEPS, sample_every=2)
        for stage, time in job.clock.summary().items():
            found[f"{name}: {stage} ms"] = time.median_ms
        copies, kernels = _copies_and_kernels(job)
        shown = covered_share(copies, kernels) if copies else "the trace shows no copy to the device"
        found[f"{name}: share of copying beside kernels"] = shown
        del job
        probed = ShardProbe(device=device, buffer_gib=4.0).measure(
            workload.tables, workload.stats(), workload.batch_size
        )
        for stage in ("fwd_compute", "bwd_compute"):
            found[f"{name}: {stage}, probed over trained"] = (
                getattr(probed, f"{stage}_ms") / found[f"{name}: {stage} ms"]
            )
    dist.destroy_process_group()


Span: TypeAlias = tuple[float, float]
"""Start and end, in one unit."""


def covered_share(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """Returns the share of the time of `spans`, which do not overlap, in which one of `others` runs."""
    merged: list[list[float]] = []
    for start, end in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    spans = list(spans)
    covered = sum(max(0.0, min(end, e) - max(start, s)) for start, end in spans for s, e in merged)
    return covered / sum(end - start for start, end in spans)


def _copies_and_kernels(job: OurJob) -> tuple[list[Span], list[Span]]:
    """Traces some steps; returns copies to the device, and kernels that compute on it."""
    with torch.profiler.profile() as profiler:
        job.run(STEPS)
        torch.cuda.synchronize()
    copies: list[Span] = []
    kernels: list[Span] = []
    for event in profiler.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        span = (event.time_range.start, event.time_range.end)
        if "HtoD" in event.name:
            copies.append(span)
        elif not event.name.startswith("Mem"):
            kernels.append(span)
    return copies, kernels


def _join() -> torch.device:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=device)
    return device


def _jobs(workload: Workload, theirs: Mapping[str, Variant], device: torch.device) -> dict[str, Callable[[], float]]:
    batches = [batch.pinned() for batch in workload.batches()]
    ours = OurJob(workload, workload.plan(1), 0, batches, device=device)
    jobs: dict[str, OurJob | TorchrecJob] = {"ours": ours}
    for name, variant in theirs.items():
        jobs[name] = TorchrecJob(workload, batches, device=device, **variant.options)
    return {name: _turn(job, device) for name, job in jobs.items()}


def _put(found: dict[str, Any], name: str, figure: Ratio) -> None:
    found[name], found["spread"][name] = round(figure.median, 3), [round(figure.low, 3), round(figure.high, 3)]


def _turn(job: OurJob | TorchrecJob, device: torch.device, tf32: bool = False) -> Callable[[], float]:
    def run() -> float:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        started = now(device)
        job.run(STEPS)
        return now(device) - started

    return run
