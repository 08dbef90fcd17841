"""Checks what runs leave behind, whichever training loop they have."""

from __future__ import annotations

from pathlib import Path

from dlrm_autoshard.records.run import RunRecord


def check_three_intervals(run_dir: Path) -> RunRecord:
    """Checks that a run has three intervals, each with a decision and all stages measured, and a report."""
    record = RunRecord.load(run_dir)
    assert len(record.intervals) == 3 and len(record.decisions) == 3
    assert record.last.samples > 3 and record.last.throughput > 0
    stages = record.last.stage_ms
    assert all(min(stages[name]) > 0 for name in ("input_dist", "fwd_compute", "fwd_comms", "bwd_comms", "bwd_compute"))
    assert (run_dir / "report.html").stat().st_size > 100_000
    return record
