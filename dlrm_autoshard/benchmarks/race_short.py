"""The race's `abrupt` world in jobs of half a minute, so that five seeds of it take a quarter of an hour.

The same arms, clocks and figures as `race`, without checkpoints, which TorchRec's job has not, and with 16 tables: on
two ranks plans of few tables differ by more. What is done lies in runs/race-short.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.race import SEEDS, outcome_of
from dlrm_autoshard.benchmarks.race_worlds import QUICK, Scale, WorldName

TITLE = "whole jobs of half a minute whose pooling is permuted once: with resharding, without, TorchRec's"
ROUGH_TIME = "20 min"

SHORT = Scale(tables=16, gib=0.5, batch=1024, epochs=8, steps=100, checkpoints=False)
WORLDS: tuple[WorldName, ...] = ("abrupt",)
ARMS = ("round_robin", "planned", "loop", "clairvoyant", "torchrec")
BEFORE = (
    "before, with 40 tables of 256 samples a rank in jobs of 20 s (86aa54d): loop on / off 1.004 (0.965 to 1.087), "
    "recovered -0.04 (-1.5 to 4.4), torchrec / loop on 1.80: two ranks with 40 tables are nearly balanced by any plan"
)


def run(quick: bool) -> dict[str, Any]:
    folder = Path("runs/race-short-quick" if quick else "runs/race-short")
    outcome = outcome_of(folder, WORLDS, ARMS, 1 if quick else SEEDS, QUICK if quick else SHORT)
    outcome["notes"].append(BEFORE)
    return outcome
