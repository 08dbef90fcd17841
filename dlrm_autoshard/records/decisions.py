"""decisions.jsonl: one line per decision, at most one per step; and decisions put into words.

log.write({"step": 500, "action": "moved", ..., "measured_gain": None})    # on disk at once
log.write({"step": 500, "action": "moved", ..., "measured_gain": 0.14})    # replaces that line one interval later
worth_in_words(line)                                                       # "14.0% (11.2 to 16.8%)", or None
moves_in_words(line)                                                       # "'ad' from rank 1 to 0"
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_autoshard.formats.words import some_of
from dlrm_autoshard.records.jsonl import SCHEMA, append_jsonl, change_jsonl, lost_if_unwritable


class DecisionLog:
    """Writes decisions.jsonl, one line per decision."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds a decision, or replaces the one of the same step."""
        written = False

        def change(line: dict[str, Any]) -> Mapping[str, Any]:
            nonlocal written
            if line.get("step") != record["step"]:
                return line
            written = True
            return {"schema": SCHEMA, **record}

        with lost_if_unwritable(self.path):
            change_jsonl(self.path, change)
        if not written:
            append_jsonl(self.path, record)

    def forget_after(self, step: int) -> None:
        with contextlib.suppress(OSError):  # `jsonl.forget_after` says so
            change_jsonl(self.path, lambda line: line if int(line.get("step", -1)) <= step else None)


def worth_in_words(decision: Mapping[str, Any]) -> str | None:
    """Returns the fraction of a step that a move saved, with its interval; None if not measured or doubtful.

    Job output, terminal report and HTML page all use this wording."""
    gain, low, high = (decision.get(f"measured_{key}") for key in ("gain", "low", "high"))
    if decision.get("doubt") or gain is None or low is None or high is None:
        return None
    return interval_in_words(gain, low, high)


def moves_in_words(decision: Mapping[str, Any], most: int = 3) -> str:
    """Returns "'ad' and 'user[0:32]' from rank 1 to 0"; "" if the record does not list the shards that moved."""
    by_way: dict[tuple[int, int], list[str]] = {}
    for move in decision.get("moves") or ():
        by_way.setdefault((move["from_rank"], move["to_rank"]), []).append(move["shard"])
    ways = sorted(by_way, key=lambda way: (-len(by_way[way]), way))
    parts = [f"{some_of(by_way[way], most)} from rank {way[0]} to {way[1]}" for way in ways[:most]]
    left = sum(len(by_way[way]) for way in ways[most:])
    return ", ".join([*parts, *([f"{left} more elsewhere"] if left else [])])


def interval_in_words(part: float, low: float, high: float) -> str:
    """Returns '18.2% (15.0 to 21.4%)'."""
    shown = [f"{round(100 * value, 1) + 0.0:.1f}" for value in (part, low, high)]
    return f"{shown[0]}% ({shown[1]} to {shown[2]}%)"
