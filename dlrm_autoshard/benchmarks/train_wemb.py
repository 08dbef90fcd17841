"""Training speed where lookups decide (W-emb): against torchrec and the limit. See train_speed.py."""

from __future__ import annotations

from typing import Any

TITLE = "training speed where lookups decide (W-emb): against torchrec and the limit"
ROUGH_TIME = "5 min"


def run(quick: bool) -> dict[str, Any]:
    from dlrm_autoshard.benchmarks.train_speed import compare
    from dlrm_autoshard.benchmarks.workloads import W_EMB

    targets = {
        "1 rank: over torchrec": ">= 1.05",
        "2 ranks: over torchrec": ">= 1.25",
        "2 ranks over 1": ">= 1.8",
        "1 rank: share of limit": ">= 0.95",
        "2 ranks: share of limit": ">= 0.88",
        "1 rank: bookkeeping ms": "<= 0.5",
        "1 rank: peak memory over tables, in batches": "<= 6",
        "2 ranks: peak memory over tables, in batches": "<= 6",
    }
    return compare(W_EMB, targets, quick)
