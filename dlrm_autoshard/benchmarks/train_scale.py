"""How the cost of a step grows with tables and ranks where the rows are tiny: what is left is Python, kernels' fixed
costs and messages. Ranks beyond the cores share them, so that W ranks on C cores take at least W / C times as long.
"""

from __future__ import annotations

import os
from typing import Any

from dlrm_autoshard.benchmarks.harness import Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import median_with_interval
from dlrm_autoshard.benchmarks.train_limits import idle_step
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory

TITLE = "growth with tables (26 to 1,000) and ranks (1 to 8) where tables are tiny: ms a step"
ROUGH_TIME = "2 min"


def run(quick: bool) -> dict[str, Any]:
    found = Findings()
    for tables in (26, 1000) if quick else (26, 100, 300, 1000):
        for ranks in (1, 2, 8) if quick else (1, 2, 4, 8):
            measured = on_pinned_ranks(_idle, ranks, tables, 20 if quick else 60)
            whole = max(step for step, _ in measured)
            found.put(f"{tables} tables, {ranks} rank{'s' * (ranks > 1)}: ms a step", round(1e3 * whole, 2))
            if ranks == 1:
                left = median_with_interval([1e3 * seconds for seconds in measured[0][1]])
                found.put(f"bookkeeping at {tables} tables, ms", left, digits=2)
    found.targets = {"bookkeeping at 26 tables, ms": "<= 0.5", "bookkeeping at 1000 tables, ms": "<= 2.0"}
    found.notes = [
        f"{len(os.sched_getaffinity(0))} cores: 8 ranks take turns on them",
        "bookkeeping: a whole step on one rank less the same kernels called alone",
    ]
    return vars(found)


def _idle(rank: int, world_size: int, tables: int, steps: int) -> tuple[float, list[float]]:
    keep_freed_memory()
    return idle_step(tables, steps)
