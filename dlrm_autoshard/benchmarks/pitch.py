"""Three reasons to use this, in the README's first bullets: a number each, linked to its record.

pitch({"loop-drift": record, "planner-quality": record})         # nothing of what has no record that counts
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

_REASONS = {
    "train-wemb": (
        "2 ranks: over torchrec",
        "- **Faster steps.** Where lookups dominate, models train {:.1f} times as fast as with TorchRec and its own "
        "planner, on two ranks of one host",
    ),
    "loop-drift": (
        "recovered",
        "- **Tables that move.** Once the data have drifted, moving tables wins back {:.0%} of what a plan made for "
        "the new data would win",
    ),
    "planner-quality": (
        "20x8 auto, tables split: excess removed",
        "- **Tables split by columns.** With 20 tables on 8 devices (exchanges modelled) that removes {:.0%} of what "
        "the best heuristic leaves above perfect balance",
    ),
}


def pitch(counted: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the README's bullets. counted: records by benchmark."""
    lines = []
    for name, (figure, words) in _REASONS.items():
        value = counted.get(name, {}).get("figures", {}).get(figure)
        if value is not None:
            lines.append(f"{words.format(value)} ([record](dlrm_autoshard/benchmarks/results/{name}.json)).")
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines)
