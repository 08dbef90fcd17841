"""decisions.jsonl: one line a decision, at most one a step.

log = DecisionLog(run / "decisions.jsonl")
log.write({"step": 500, "action": "moved", ..., "measured_gain": None})    # on disk at once
log.write({"step": 500, "action": "moved", ..., "measured_gain": 0.14})    # in its place, an interval later
log.forget_after(400)                                                      # going on from an earlier checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_autoshard.records.jsonl import SCHEMA, append_jsonl, change_jsonl, lost_where_full, read_jsonl


class DecisionLog:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds a decision, or puts it in the place of that of the same step."""
        if all(line.get("step") != record["step"] for line in read_jsonl(self.path)):
            return append_jsonl(self.path, record)
        new = {"schema": SCHEMA, **record}
        with lost_where_full(self.path):
            change_jsonl(self.path, lambda line: new if line.get("step") == record["step"] else line)

    def forget_after(self, step: int) -> None:
        change_jsonl(self.path, lambda line: line if int(line.get("step", -1)) <= step else None)
