"""The race's `abrupt` world in jobs of 20 to 45 seconds, so that five seeds of it take a quarter of an hour.

The same arms, clocks and figures as `race`, at the size of SHORT and without checkpoints, which TorchRec's job has
not. Start-up and planning weigh more in so short a job, against the arms that plan. What is done lies in
runs/race-short.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.race import SEEDS, outcome_of
from dlrm_autoshard.benchmarks.race_worlds import QUICK, Scale, WorldName

TITLE = "whole jobs of 20 to 45 s whose pooling is permuted once: with resharding, without, TorchRec's"
ROUGH_TIME = "15 min"

SHORT = Scale(tables=40, gib=0.5, batch=256, epochs=8, steps=100, checkpoints=False)
WORLDS: tuple[WorldName, ...] = ("abrupt",)
ARMS = ("round_robin", "planned", "loop", "clairvoyant", "torchrec")


def run(quick: bool) -> dict[str, Any]:
    folder = Path("runs/race-short-quick" if quick else "runs/race-short")
    return outcome_of(folder, WORLDS, ARMS, 1 if quick else SEEDS, QUICK if quick else SHORT)
