"""TensorBoard scalars of metrics and stages, where TensorBoard is installed; nothing where it is not.

    scalars = ScalarWriter(run_dir / "tensorboard")
    scalars.metrics({"step": 50, "epoch": 0, "split": "train", "logloss": 0.61})     # train/logloss
    scalars.profile(profile)                                                         # stage/fwd_compute/slowest, ...
    scalars.close()

It takes the same records as the run's files, so what TensorBoard shows is what the report shows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_autoshard.records.epoch import EpochProfile
from dlrm_autoshard.report.summary import total_wait_ms

_NOT_METRICS = ("schema", "step", "epoch", "split")


class ScalarWriter:
    """For rank 0. `enabled` says whether anything is written."""

    def __init__(self, log_dir: Path) -> None:
        self.enabled = importlib.util.find_spec("tensorboard") is not None
        if self.enabled:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(log_dir))

    def metrics(self, line: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""
        for name, value in line.items():
            if name not in _NOT_METRICS and isinstance(value, int | float):
                self._write(f"{line['split']}/{name}", value, line["step"])

    def profile(self, profile: EpochProfile) -> None:
        """One line of costs/epochs.jsonl: each stage's slowest and mean rank, waits, imbalance, prediction error."""
        step = profile.end_step
        waits = ("wait", total_wait_ms(profile))
        for name, times in [*profile.stage_ms.items(), waits]:
            self._write(f"stage/{name}/slowest", max(times), step)
            self._write(f"stage/{name}/mean", sum(times) / len(times), step)
        self._write("step/mean_ms", profile.mean_step_ms, step)
        self._write("step/sampled_ms", profile.step_ms, step)
        self._write("step/balanced_ms", profile.balanced_ms, step)
        if profile.prediction_error is not None:
            self._write("step/prediction_error", profile.prediction_error, step)

    def close(self) -> None:
        if self.enabled:
            self._writer.close()

    def _write(self, name: str, value: float, step: int) -> None:
        if self.enabled:
            self._writer.add_scalar(name, value, step)
