"""TorchRec with Autoshard from the worst plan, and under our plans against its own planner's.

It can't run without torchrec; peer_torchrec.py says where to get it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.harness import BenchError, Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import median_with_interval, paired_ratio
from dlrm_autoshard.benchmarks.peer_torchrec import find_torchrec
from dlrm_autoshard.benchmarks.plans_interleaved import best_of
from dlrm_autoshard.benchmarks.torchrec_loop_job import (
    from_the_worst_plan,
    under_both_plans,
    workload,
)

TITLE = "TorchRec models: left from their worst plan, and under our plans and TorchRec's own"
ROUGH_TIME = "7 min"


def run(quick: bool) -> dict[str, Any]:
    reason = find_torchrec()
    if reason is not None:
        raise BenchError(f"torchrec-loop cannot run here: {reason}")
    found = Findings()
    _worst_plan(found, quick)
    _planners(found, quick)
    return vars(found)


def _worst_plan(found: Findings, quick: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = on_pinned_ranks(
            from_the_worst_plan, 2, str(Path(folder, "run")), 2 if quick else 4, 20, 2 if quick else 8, timeout=900
        )
    seconds, moves = runs[0]
    rates = {name: [1 / took for took in turns] for name, turns in seconds.items()}
    best, chosen = best_of(rates, [name for name in rates if name not in ("found", "worst")])
    found.put("of best known", paired_ratio(rates["found"], best), ">= 0.95")
    found.put("moves", moves, "<= 2")
    found.put("over the worst plan", paired_ratio(rates["found"], rates["worst"]))
    found.notes += [
        "from the worst plan: W-emb, all tables on one of two ranks; moves: all of Autoshard's, the first plan's too",
        "best known: of our planner's plans with two seeds and TorchRec's own, each half of the rounds measuring what "
        f"the other chose; here {' and '.join(chosen)}",
    ]


def _planners(found: Findings, quick: bool) -> None:
    slower = []
    for name in ("W-emb", "50 mixed dims"):
        ratios = []
        for seed in range(1 if quick else 5):
            ours, theirs = on_pinned_ranks(under_both_plans, 2, workload(name, seed), 2 if quick else 9, timeout=600)[0]
            ratio = paired_ratio(theirs, ours)
            ratios.append(ratio.median)
            if ratio.high < 1:
                slower.append(f"{name}, seed {seed}")
            found.notes.append(f"{name}, seed {seed}: {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]")
        found.put(f"{name}: step time, TorchRec's planner / ours", median_with_interval(ratios))
    found.put("seeds slower beyond noise under our plan", len(slower), "== 0")
    found.notes += [f"slower under our plan: {which}" for which in slower]
    found.notes.append("seeds: of the data, of our planner and of the mixed tables; intervals: over seeds")
