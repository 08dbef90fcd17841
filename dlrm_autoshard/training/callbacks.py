"""Sends a run's figures to TensorBoard, W&B, MLflow, or a user's class named in `callbacks:`.

callbacks: [tensorboard, "my_company.tracking:Tracker"]         # called as Tracker(run_dir, config), on rank 0

They receive what the run's files receive, so dashboards and the report agree.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dlrm_autoshard.config import Config
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plug_in import call, check_place, load
from dlrm_autoshard.records.interval import IntervalProfile
from dlrm_autoshard.report.summary import total_wait_ms

_NOT_METRICS = ("schema", "step", "epoch", "split")


class Callback(Protocol):
    """Interface of a callback. Rank 0 makes one per name in `callbacks:` and calls it between training steps."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Receives values at a step, by names such as `train/logloss` and `stage/fwd_compute/slowest` (ms)."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """Receives result.json at the end; not called if the job fails."""


class TensorBoard:
    """Writes TensorBoard's files; purges lines of an earlier start for steps that are trained again."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = partial(SummaryWriter, str(run_dir / "tensorboard"))
        self._writer: Any = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            evaluated = all(name.startswith(("val/", "test/")) for name in values)  # keep that step's training figures
            self._writer = self._open(purge_step=step + evaluated)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, result: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Sends to W&B; WANDB_PROJECT and WANDB_MODE=offline are W&B's own settings."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        import wandb

        self._run = wandb.init(name=run_dir.name, dir=str(run_dir), config=config.model_dump(mode="json"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, result: Mapping[str, Any]) -> None:
        self._run.summary.update(result["metrics"])
        self._run.finish()


class MLflow:
    """Sends to MLflow; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are MLflow's own settings."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.start_run(run_name=run_dir.name)
        mlflow.log_dict(config.model_dump(mode="json"), "config.yaml")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def finish(self, result: Mapping[str, Any]) -> None:
        self._mlflow.log_dict(dict(result), "result.json")
        self._mlflow.end_run()


Factory = Callable[[Path, Config], Callback]
READY: dict[str, Factory] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check_callbacks(names: Sequence[str]) -> None:
    """Raises UserError if a callback is missing or not installed; runs none of their code."""
    for name in names:
        if name in READY:
            if importlib.util.find_spec(name) is None:
                raise UserError(f"callbacks: '{name}' is not installed. Install it with: pip install {name}")
        elif ":" in name:
            check_place(name, "callbacks")
        else:
            close = difflib.get_close_matches(name, READY, n=1)
            raise UserError(
                f"callbacks: '{name}' is none of {', '.join(READY)}, nor of the form package:factory."
                + (f" Did you mean '{close[0]}'?" if close else "")
            )


def find_callbacks(names: Sequence[str]) -> list[Factory]:
    """Returns a factory per callback; UserError if one is missing or not installed."""
    check_callbacks(names)
    return [
        partial(_start, name) if name in READY else partial(call, load(name, "callbacks"), "callbacks")
        for name in names
    ]


def _start(name: str, run_dir: Path, config: Config) -> Callback:
    try:
        return READY[name](run_dir, config)
    except Exception as error:  # the service does not answer, or is not set up
        raise UserError(f"callbacks: '{name}' cannot start: {error}") from error


def metric_scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns a line of metrics.jsonl as scalars such as train/logloss."""
    return {
        f"{line['split']}/{name}": value
        for name, value in line.items()
        if name not in _NOT_METRICS and isinstance(value, int | float)
    }


def profile_scalars(profile: IntervalProfile) -> dict[str, float]:
    """Returns an interval's profile as scalars: each stage's slowest and mean rank, waits, balance, prediction
    error."""
    values = {}
    for name, times in [*profile.stage_ms.items(), ("wait", total_wait_ms(profile))]:
        values[f"stage/{name}/slowest"] = max(times)
        values[f"stage/{name}/mean"] = sum(times) / len(times)
    values["step/mean_ms"] = profile.mean_step_ms
    values["step/sampled_ms"] = profile.step_ms
    values["step/balanced_ms"] = profile.balanced_ms
    if profile.prediction_error is not None:
        values["step/prediction_error"] = profile.prediction_error
    if profile.prediction_bias is not None:
        values["step/prediction_bias"] = profile.prediction_bias
    return values
