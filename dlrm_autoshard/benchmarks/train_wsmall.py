"""Training speed where the MLPs dominate (W-small), against TorchRec and the kernels' limit; see train_speed.py."""

from __future__ import annotations

from typing import Any

from dlrm_autoshard.benchmarks.train_speed import TARGETS, compare
from dlrm_autoshard.benchmarks.workloads import W_SMALL

TITLE = "training speed where the MLPs dominate (W-small), against TorchRec and the kernels' limit"
ROUGH_TIME = "5 min"


def run(quick: bool) -> dict[str, Any]:
    return compare(W_SMALL, {**TARGETS, "2 ranks: over torchrec": ">= 1.15"}, quick)
