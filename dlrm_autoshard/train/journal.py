"""What rank 0 writes down for people: metrics.jsonl, TensorBoard scalars, and report.html at the end.

journal = Journal(run_dir, active=runtime.rank == 0)
journal.metrics(step=50, epoch=0, split="train", metrics={"logloss": 0.61})
journal.profile(record); journal.finish()
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dlrm_autoshard.records.epoch import EpochProfile
from dlrm_autoshard.records.jsonl import ReportError, append_jsonl
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.train.tensorboard import ScalarWriter


class Journal:
    """Does nothing on ranks where it is not `active`."""

    def __init__(self, run_dir: Path, *, active: bool) -> None:
        self._run_dir = run_dir
        self._scalars = ScalarWriter(run_dir / "tensorboard") if active else None

    def metrics(self, step: int, epoch: int, split: str, metrics: Mapping[str, float]) -> None:
        if self._scalars is not None:
            line = {"step": step, "epoch": epoch, "split": split, **metrics}
            append_jsonl(self._run_dir / "metrics.jsonl", line)
            self._scalars.metrics(line)

    def profile(self, record: EpochProfile) -> None:
        """An interval's stages, as TensorBoard scalars (the recorder has written its line already)."""
        if self._scalars is not None:
            self._scalars.profile(record)

    def finish(self) -> str | None:
        """Writes the report; a sentence that says where it is, or why there is none."""
        if self._scalars is None:
            return None
        self._scalars.close()
        from dlrm_autoshard.report.html import write_html  # the plotting library, which training has no use for

        try:
            return f"report: {write_html(self._run_dir, RunRecord.load(self._run_dir))}"
        except (ReportError, OSError) as error:
            return f"no report.html: {error}"
