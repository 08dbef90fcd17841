"""Three reasons to use this, in the README's first bullets: a number each, linked to its record.

pitch({"race-short": record, "planner-quality": record})         # nothing of what has no record that counts
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

NET = ", steps, deciding and moving"
"""Suffix of the figures of races that ran in turns; their record is history."""
_REASONS = {
    "train-wemb": (
        "2 ranks: over torchrec",
        "- **Faster steps.** Where lookups dominate, models train {:.1f} times as fast as with TorchRec and its own "
        "planner, on two ranks of one host",
    ),
    "race-short": (
        f"abrupt: loop on / loop off{NET}",
        "- **Tables that move.** Where the data drift once in a job of half a minute, moving takes {} of its time "
        "away, deciding and moving counted",
    ),
    "planner-quality": (
        "20x8 auto, tables split: excess removed",
        "- **Tables split by columns.** With 20 tables on 8 devices (exchanges modelled) that removes {:.0%} of what "
        "the best heuristic leaves above perfect balance",
    ),
}


def pitch(counted: Mapping[str, Mapping[str, Any]]) -> str:
    """counted: records by benchmark."""
    lines = []
    for name, (figure, words) in _REASONS.items():
        value = counted.get(name, {}).get("figures", {}).get(figure)
        if value is not None:
            told = _saved(value) if name == "race-short" else value
            lines.append(f"{words.format(told)} ([record](dlrm_autoshard/benchmarks/results/{name}.json)).")
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def _saved(ratio: float) -> str:
    """Part of the time that is saved: '6%'; negative where there is more."""
    return f"{1 - ratio:.0%}"
