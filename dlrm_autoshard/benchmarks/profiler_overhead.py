"""What sampling every 20th step costs: the same trainer with and without, in turn, on W-emb.

A sampled step has barriers, marks and no overlap, so it is slower than the others; one in twenty is what the config's
`profile.every_steps` starts with.
"""

from __future__ import annotations

from typing import Any

TITLE = "cost of profiling one step in 20: epoch time with and without, in turn"
ROUGH_TIME = "2 min"
EVERY_STEPS = 20


def run(quick: bool) -> dict[str, Any]:
    from dlrm_autoshard.benchmarks.harness import on_pinned_ranks, paired_ratio
    from dlrm_autoshard.benchmarks.workloads import W_EMB

    figures, spread = {}, {}
    for ranks in (1, 2):
        measured = on_pinned_ranks(_measure, ranks, W_EMB, W_EMB.plan(ranks), 6 if quick else 20)
        plain = [max(times) for times in zip(*(m[0] for m in measured), strict=True)]
        profiled = [max(times) for times in zip(*(m[1] for m in measured), strict=True)]
        ratio = paired_ratio(profiled, plain)
        name = f"overhead at {ranks} rank{'s' * (ranks > 1)}, percent"
        figures[name] = round(100 * (ratio.median - 1), 2)
        spread[name] = [round(100 * (ratio.low - 1), 2), round(100 * (ratio.high - 1), 2)]
    return {"figures": figures, "targets": dict.fromkeys(figures, "<= 1.0"), "spread": spread}


def _measure(rank: int, world_size: int, workload: Any, plan: Any, rounds: int) -> tuple[list[float], list[float]]:
    import torch.distributed as dist

    from dlrm_autoshard.benchmarks.workloads import OurJob
    from dlrm_autoshard.distributed.runtime import keep_freed_memory

    keep_freed_memory()
    job = OurJob(workload, plan, rank, workload.batches(rank, world_size))
    job.run(10)
    plain: list[float] = []
    profiled: list[float] = []
    for _ in range(rounds):
        for sample_every, times in ((0, plain), (EVERY_STEPS, profiled)):
            dist.barrier()
            times.append(job.run(EVERY_STEPS, sample_every=sample_every))
    return plain, profiled
