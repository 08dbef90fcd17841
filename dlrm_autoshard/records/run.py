"""Everything that a run wrote down, read back from its directory.

    record = RunRecord.load(Path("runs/movielens"))
    record.last.straggler                      # of the last complete epoch
    record.metrics_of("val")                   # [{"step": ..., "auc": ...}, ...]

Terminal, HTML, JSON and CSV reports are functions of this record and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dlrm_autoshard.records.epoch import EpochProfile, RankEpoch, epochs_file
from dlrm_autoshard.records.jsonl import SCHEMA, ReportError, read_jsonl


@dataclass(frozen=True)
class RunRecord:
    """epochs: complete ones, in order; empty only where profiling was off. ranks: every rank's own records of them."""

    name: str
    config: Mapping[str, Any]
    epochs: tuple[EpochProfile, ...]
    ranks: tuple[RankEpoch, ...] = ()
    metrics: tuple[Mapping[str, Any], ...] = ()
    decisions: tuple[Mapping[str, Any], ...] = field(default=())
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions and machine of the latest start; {} where they were not written down."""
    starts: int = 1
    """How often the run was started: continued ones more than once."""

    @staticmethod
    def load(run_dir: Path) -> RunRecord:
        if not run_dir.is_dir():
            raise ReportError(f"'{run_dir}' is not a directory. Name a run's directory, such as runs/movielens.")
        config = _config(run_dir / "config.yaml")
        metrics = read_jsonl(run_dir / "metrics.jsonl")
        lines = read_jsonl(epochs_file(run_dir))
        if not lines and not (metrics and config.get("profile", {}).get("enabled") is False):
            raise ReportError(_why_nothing(run_dir, config, metrics))
        epochs = tuple(_named(EpochProfile.from_json, line, epochs_file(run_dir)) for line in lines)
        complete = {epoch.epoch for epoch in epochs}
        ranks = [
            _named(RankEpoch.from_json, line, path)
            for path in sorted((run_dir / "costs").glob("rank_*.jsonl"))
            for line in read_jsonl(path)
        ]
        return RunRecord(
            name=run_dir.resolve().name,
            config=config,
            epochs=epochs,
            ranks=tuple(rank for rank in ranks if rank.epoch in complete),
            metrics=tuple(metrics),
            decisions=tuple(read_jsonl(run_dir / "decisions.jsonl")),
            environment=_environment(run_dir / "environment.json"),
            starts=1 + sum(1 for _ in run_dir.glob("starts/*")),
        )

    @property
    def last(self) -> EpochProfile:
        return self.epochs[-1]

    def label(self, profile: EpochProfile) -> str:
        """The epoch's number; with its steps where an epoch was profiled in several parts."""
        if sum(other.epoch == profile.epoch for other in self.epochs) == 1:
            return str(profile.epoch)
        return f"{profile.epoch} ({profile.first_step}-{profile.end_step - 1})"

    def metrics_of(self, split: str) -> list[Mapping[str, Any]]:
        return [line for line in self.metrics if line.get("split") == split]

    def final_metrics(self) -> tuple[str, Mapping[str, Any]] | None:
        """The last evaluation: on test data where there was one, else on validation data."""
        for split in ("test", "val"):
            lines = self.metrics_of(split)
            if lines:
                return split, lines[-1]
        return None

    @property
    def stopped_early(self) -> str | None:
        """A sentence where the run ended, or still is, short of the epochs it was to have."""
        if not self.epochs:
            return None
        train = self.config.get("train", {})
        done, last_step = self.last.epoch + 1, self.last.end_step
        seen = max((int(line["step"]) for line in self.metrics if line.get("step") is not None), default=last_step)
        if (done >= train.get("epochs", done) and seen <= last_step) or last_step >= (train.get("max_steps") or 2**62):
            return None
        beyond = f"; it was last seen at step {seen:,}" if seen > last_step else ""
        return (
            f"The run has not ended well, or goes on: {done} of {train.get('epochs', done)} epochs are profiled, "
            f"to step {last_step:,}{beyond}. This report covers those."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "name": self.name,
            "config": dict(self.config),
            "environment": dict(self.environment),
            "starts": self.starts,
            "epochs": [profile.to_json() for profile in self.epochs],
            "metrics": [dict(line) for line in self.metrics],
            "decisions": [dict(line) for line in self.decisions],
        }


def _config(path: Path) -> dict[str, Any]:
    """As it was written, unchecked: a report outlives the config's schema."""
    try:
        config = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ReportError(f"'{path}' cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def _environment(path: Path) -> dict[str, Any]:
    """What helps to understand a run, but nothing that a report needs."""
    try:
        environment = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return environment if isinstance(environment, dict) else {}


def _named(parse: Any, line: Mapping[str, Any], path: Path) -> Any:
    try:
        return parse(line)
    except ReportError as error:
        raise ReportError(f"'{path}', epoch {line.get('epoch')}: {error}") from error


def _why_nothing(run_dir: Path, config: Mapping[str, Any], metrics: list[dict[str, Any]]) -> str:
    there = sorted(path.name + ("/" if path.is_dir() else "") for path in run_dir.iterdir() if path.name[0] != ".")
    if not there:
        return f"'{run_dir}' is empty: nothing to report. Name the directory of a run (<run.dir>/<run.name>)."
    if not config and not metrics:
        return (
            f"'{run_dir}' holds no run: it has no config.yaml, metrics.jsonl or costs/epochs.jsonl, "
            f"but {_some(there)}. Name the directory of a run (<run.dir>/<run.name>)."
        )
    reached = f", and metrics up to step {metrics[-1].get('step')}" if metrics else ""
    return (
        f"'{run_dir}' has no complete epoch yet: the run was stopped in its first epoch, or is still in it. "
        f"There is {_some(there)}{reached}. Continue it with --resume; a report needs one complete epoch."
    )


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
