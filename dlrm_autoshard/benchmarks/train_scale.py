"""How the cost of a step grows with tables and ranks where the rows are tiny: what is left is Python, kernels' fixed
costs and messages. Ranks beyond the cores share them, so that W ranks on C cores take at least W / C times as long.
"""

from __future__ import annotations

from typing import Any

TITLE = "growth with tables (26 to 1,000) and ranks (1 to 8) where tables are tiny: ms a step"
ROUGH_TIME = "2 min"


def run(quick: bool) -> dict[str, Any]:
    import os

    from dlrm_autoshard.benchmarks.harness import median_with_interval, on_pinned_ranks

    figures: dict[str, Any] = {}
    spread: dict[str, list[float]] = {}
    cores = len(os.sched_getaffinity(0))
    for tables in (26, 1000) if quick else (26, 100, 300, 1000):
        for ranks in (1, 2, 8) if quick else (1, 2, 4, 8):
            measured = on_pinned_ranks(_idle, ranks, tables, 20 if quick else 60)
            whole = max(step for step, _ in measured)
            figures[f"{tables} tables, {ranks} rank{'s' * (ranks > 1)}: ms a step"] = round(1e3 * whole, 2)
            if ranks == 1:
                name, left = f"bookkeeping at {tables} tables, ms", median_with_interval(measured[0][1])
                figures[name] = round(1e3 * left.median, 2)
                spread[name] = [round(1e3 * left.low, 2), round(1e3 * left.high, 2)]
    notes = [
        f"{cores} cores: 8 ranks take turns on them",
        "bookkeeping: a whole step on one rank less the same kernels called alone",
    ]
    targets = {"bookkeeping at 26 tables, ms": "<= 0.5", "bookkeeping at 1000 tables, ms": "<= 2.0"}
    return {"figures": figures, "targets": targets, "spread": spread, "notes": notes}


def _idle(rank: int, world_size: int, tables: int, steps: int) -> tuple[float, list[float]]:
    from dlrm_autoshard.benchmarks.train_speed import idle_step
    from dlrm_autoshard.distributed.runtime import keep_freed_memory

    keep_freed_memory()
    return idle_step(tables, steps)
