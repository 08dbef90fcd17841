"""Where figures go beside the run's own files: TensorBoard, W&B, MLflow, or what a user names in `callbacks:`.

callbacks: [tensorboard, "my_company.tracking:Tracker"]         # called as Tracker(run_dir, config), on rank 0

They get what the run's files get, so what a dashboard shows is what the report shows.
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
    """Interface of a callback: each name in `callbacks:` makes one, on rank 0; methods are called between training
    steps."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """values: by names such as `train/logloss` and `stage/fwd_compute/slowest` (ms)."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """result: what result.json holds. Not called where a job fails."""


class TensorBoard:
    """TensorBoard's files. Lines that an earlier start wrote of steps that are done again are purged."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = partial(SummaryWriter, str(run_dir / "tensorboard"))
        self._writer: Any = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            evaluated = all(name.startswith(("val/", "test/")) for name in values)  # after that step's other figures
            self._writer = self._open(purge_step=step + evaluated)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, result: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Project and mode are W&B's own settings: WANDB_PROJECT, WANDB_MODE=offline."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        import wandb

        self._run = wandb.init(name=run_dir.name, dir=str(run_dir), config=config.model_dump(mode="json"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, result: Mapping[str, Any]) -> None:
        self._run.summary.update(result["metrics"])
        self._run.finish()


class MLflow:
    """Server and experiment are MLflow's own settings: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

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
    """UserError where one is not installed or not there. None of their code is run."""
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
    """Returns what makes each of them. UserError where one is not installed or not there."""
    check_callbacks(names)
    return [
        partial(_start, name) if name in READY else partial(call, load(name, "callbacks"), "callbacks")
        for name in names
    ]


def _start(name: str, run_dir: Path, config: Config) -> Callback:
    try:
        return READY[name](run_dir, config)
    except Exception as error:  # of a service that does not answer, or is not set up
        raise UserError(f"callbacks: '{name}' cannot start: {error}") from error


def metric_scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns a line of metrics.jsonl as scalars: train/logloss and the like."""
    return {
        f"{line['split']}/{name}": value
        for name, value in line.items()
        if name not in _NOT_METRICS and isinstance(value, int | float)
    }


def profile_scalars(profile: IntervalProfile) -> dict[str, float]:
    """Returns a profile as scalars: each stage's slowest and mean rank, waits, balance, prediction error."""
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
