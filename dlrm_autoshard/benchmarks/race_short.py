"""The race's worlds in jobs of half a minute, so that five seeds of all six take two hours.

The same arms, clocks and figures as `race`, without checkpoints and with 16 tables: on two ranks plans of few tables
differ by more. What is done lies in runs/race-short.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.race import SEEDS, outcome_of
from dlrm_autoshard.benchmarks.race_arms import Arms
from dlrm_autoshard.benchmarks.race_worlds import QUICK, Scale

TITLE = "whole jobs of half a minute in six worlds: with resharding, without, clairvoyant, TorchRec's"
ROUGH_TIME = "2 h; goes on where it was stopped"

SHORT = Scale(tables=16, gib=0.5, batch=1024, epochs=8, steps=100, checkpoints=False)
CHANGING = ("planned", "loop", "clairvoyant", "torchrec")
WORLDS: Arms = {
    "abrupt": (*CHANGING, "round_robin"),
    "calm": ("planned", "loop", "torchrec"),
    "straggler": CHANGING,
    "hot-ids": CHANGING,
    "tight": ("planned", "loop", "torchrec"),  # TorchRec's job is told of no limit
    "gradual": CHANGING,
}


def run(quick: bool) -> dict[str, Any]:
    if quick:
        return outcome_of(Path("runs/race-short-quick"), {"abrupt": WORLDS["abrupt"]}, 1, QUICK)
    outcome = outcome_of(Path("runs/race-short"), WORLDS, SEEDS, SHORT)
    outcome["notes"].append(
        "before clairvoyants had that long, on a steadier machine, in turns with what deciding and moving took: "
        "loop on / loop off 0.940 where pooling is permuted (e5e73d8) and 0.939 with a straggler (3cf2a13), of "
        "clairvoyants' gains recovered 0.791 and 0.645"
    )
    return outcome
