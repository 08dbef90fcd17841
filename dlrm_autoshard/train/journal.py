"""What rank 0 writes down for people and programs: metrics.jsonl, result.json and report.html, and the callbacks' part.

journal = Journal(run_dir, callbacks, active=runtime.rank == 0)
journal.metrics(step=50, epoch=0, split="train", metrics={"logloss": 0.61})
for sentence in journal.finish(plan, seconds, best): ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm_autoshard.formats.whole_file import write_whole
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.interval import IntervalProfile
from dlrm_autoshard.records.jsonl import SCHEMA, ReportError, append_jsonl, change_jsonl
from dlrm_autoshard.records.run import RESULT, RunRecord
from dlrm_autoshard.report.verdict import autoshard_in_one_line
from dlrm_autoshard.train.callbacks import Callback, metric_scalars, profile_scalars
from dlrm_autoshard.train.selection import BestSoFar

_OF_MOVES = (
    *("step", "action", "moves", "bytes_moved", "predicted_gain"),
    *("measured_gain", "measured_low", "measured_high", "doubt"),
)
"""Keys of a decision that the result has of each move."""


class Journal:
    """Does nothing on ranks where it is not `active`."""

    def __init__(
        self, run_dir: Path, callbacks: Sequence[Callback] = (), *, active: bool, resumed_at: int | None = None
    ) -> None:
        """resumed_at: the step after which an earlier start may have evaluated already."""
        self._run_dir, self._callbacks, self._active, self._resumed_at = run_dir, callbacks, active, resumed_at

    def metrics(self, step: int, epoch: int, split: str, metrics: Mapping[str, float]) -> None:
        if self._active:
            line = {"step": step, "epoch": epoch, "split": split, **metrics}
            if step == self._resumed_at and split != "train":  # made again: it takes the earlier one's place
                earlier = (step, split)
                change_jsonl(
                    self._run_dir / "metrics.jsonl",
                    lambda old: None if (old.get("step"), old.get("split")) == earlier else old,
                )
            append_jsonl(self._run_dir / "metrics.jsonl", line)
            self._tell(step, metric_scalars(line))

    def profile(self, record: IntervalProfile) -> None:
        """An interval's stages (`Intervals` has written its line already)."""
        self._tell(record.end_step, profile_scalars(record))

    def finish(
        self,
        plan: ShardingPlan,
        seconds: Mapping[str, float],
        best: BestSoFar | None = None,
        best_on_test: Mapping[str, float] | None = None,
    ) -> list[str]:
        """Writes the result and the report. Returns last words: what moves gained, and where the report is.

        seconds: by phase (`result.json` in SCHEMA.md). best: evaluation on val, where something is chosen by it.
        best_on_test: that checkpoint's metrics there, where it is not the last.
        """
        if not self._active:
            return []
        from dlrm_autoshard.report.html import write_html  # the plotting library, which training has no use for

        try:
            record = RunRecord.load(self._run_dir)
            result = result_of(record, plan, seconds, best, best_on_test)
            write_whole(self._run_dir / RESULT, json.dumps(result, indent=1) + "\n")
            for callback in self._callbacks:
                callback.finish(result)
            report = f"report: {write_html(self._run_dir, replace(record, finished=True))}"
        except (ReportError, OSError) as error:
            missing = "report.html" if (self._run_dir / RESULT).exists() else f"{RESULT} and no report.html"
            return [f"no {missing}: {error}"]
        return [autoshard_in_one_line(record), report] if record.decisions else [report]

    def _tell(self, step: int, values: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            callback.scalars(step, values)


def result_of(
    record: RunRecord,
    plan: ShardingPlan,
    seconds: Mapping[str, float],
    best: BestSoFar | None = None,
    best_on_test: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A finished run in one small object: what scripts and sweeps read."""
    split, metrics = record.final_metrics() or (None, {})
    moves = [d for d in record.decisions if d.get("action") in ("moved", "rolled_back")]
    speeds = [line["throughput"] for line in record.metrics_of("train") if "throughput" in line]
    known = ("schema", "step", "epoch", "split")
    return {
        "schema": SCHEMA,
        "name": record.name,
        "steps": max((int(line["step"]) for line in record.metrics), default=0),
        "split": split,
        "metrics": {name: value for name, value in metrics.items() if name not in known},
        "best": best and {"metric": best.metric, "value": best.value, "step": best.step, "test": best_on_test},
        "throughput": speeds[-1] if speeds else None,
        "plan": plan.to_json(),
        "moves": [{key: d.get(key) for key in _OF_MOVES} for d in moves],
        "seconds": {phase: round(value, 3) for phase, value in seconds.items()},
    }
