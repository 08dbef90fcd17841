"""Reads all records of a run's directory, for terminal, HTML, JSON and CSV reports.

record = RunRecord.load(Path("runs/movielens"))
record.last.straggler                      # in the last complete interval
record.metrics_of("val")                   # [{"step": ..., "auc": ...}, ...]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import Required, TypedDict

from dlrm_autoshard.formats.json_file import FormatError, NotReadable, checked, parse_json, read_bytes
from dlrm_autoshard.formats.numbers import Count, Number
from dlrm_autoshard.formats.yaml_file import read_yaml
from dlrm_autoshard.plan import MoveRecord
from dlrm_autoshard.records.diagnosis import Balance, balance_of
from dlrm_autoshard.records.facts import RankInterval
from dlrm_autoshard.records.interval import IntervalProfile, epochs_file
from dlrm_autoshard.records.jsonl import SCHEMA, ReportError, read_records, shown
from dlrm_autoshard.records.plans import replicated_in
from dlrm_autoshard.tables import TableConfig

RESULT = "result.json"
"""Written when a run finishes."""


@dataclass(frozen=True)
class RunRecord:
    """A run's records. intervals: complete ones, in order; empty only without profiling. ranks: each rank's own."""

    name: str
    config: Mapping[str, Any]
    intervals: tuple[IntervalProfile, ...]
    ranks: tuple[RankInterval, ...] = ()
    metrics: tuple[Mapping[str, Any], ...] = ()
    decisions: tuple[Mapping[str, Any], ...] = field(default=())
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions and machine of the latest start; {} if unknown."""
    starts: int = 1
    """Number of starts: more than one if the run was resumed."""
    finished: bool = False
    """Whether the latest start ended with a result."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase of the latest start, if it finished."""
    replicated: tuple[str, ...] = ()
    """Tables replicated on every rank since the latest start, which no plan lists."""
    budget_bytes: tuple[int, ...] = ()
    """Memory budget for tables by rank, from the latest start plan; () without one or without a limit."""

    @staticmethod
    def load(run_dir: Path) -> RunRecord:
        """Reads a run. Raises ReportError if there is nothing to report on."""
        record = RunRecord.read(run_dir)
        record.check_reportable(run_dir)
        return record

    @staticmethod
    def read(run_dir: Path) -> RunRecord:
        """Reads a directory's records, even if there is too little to report on."""
        if not run_dir.is_dir():
            raise ReportError(f"'{run_dir}' is not a directory. Name a run's directory, such as runs/movielens.")
        config = _config(run_dir / "config.yaml")
        metrics = tuple(read_records(run_dir / "metrics.jsonl", _of_kind(MetricsRecord)))
        intervals = tuple(read_records(epochs_file(run_dir), IntervalProfile.from_json))
        complete = {(interval.epoch, interval.end_step) for interval in intervals}
        files = sorted((run_dir / "costs").glob("rank_*.jsonl"))
        ranks = [rank for path in files for rank in read_records(path, RankInterval.from_json)]
        return RunRecord(
            name=run_dir.resolve().name,
            config=config,
            intervals=intervals,
            ranks=tuple(rank for rank in ranks if (rank.epoch, rank.end_step) in complete),
            metrics=metrics,
            decisions=tuple(read_records(run_dir / "decisions.jsonl", _of_kind(DecisionRecord))),
            environment=_object(run_dir / "environment.json", "environment"),
            starts=1 + sum(1 for _ in run_dir.glob("starts/*")),
            finished=(run_dir / RESULT).exists(),
            seconds=_seconds(run_dir / RESULT),
            replicated=tuple(table.name for table in _replicated(run_dir)),
            budget_bytes=_budget(run_dir / "plan" / "evidence.jsonl"),
        )

    def check_reportable(self, run_dir: Path) -> None:
        """Raises ReportError if there is nothing to report on."""
        if not self.intervals and not (self.metrics and self.config.get("profile", {}).get("enabled") is False):
            raise ReportError(_why_nothing(run_dir, self.config, self.metrics))

    @property
    def last(self) -> IntervalProfile:
        return self.intervals[-1]

    @property
    def reported(self) -> IntervalProfile:
        """The interval that reports describe: the last one with at least three sampled steps, since a run's last
        interval may be short; the last interval if it has no sampled step or no interval has three."""
        known = [profile for profile in self.intervals if profile.samples >= 3]
        return known[-1] if known and self.last.samples else self.last

    @property
    def unit(self) -> str:
        """'epoch', or 'interval' for custom loops, which have neither epochs nor a config."""
        return "epoch" if self.config else "interval"

    def label(self, profile: IntervalProfile) -> str:
        """Returns the epoch's number, with the steps if the epoch has several intervals."""
        return (
            f"{profile.epoch} ({profile.first_step}-{profile.end_step - 1})"
            if self._is_part(profile)
            else str(profile.epoch)
        )

    def span(self, first: IntervalProfile, last: IntervalProfile | None = None) -> str:
        """Returns 'epoch 2', 'epochs 0 to 2', or 'steps 40 to 79' if an epoch has several intervals."""
        last = last or first
        if any(self._is_part(profile) for profile in (first, last)):
            return f"steps {first.first_step:,} to {last.end_step - 1:,}"
        return f"{self.unit} {first.epoch}" if first is last else f"{self.unit}s {first.epoch} to {last.epoch}"

    def _is_part(self, profile: IntervalProfile) -> bool:
        return sum(other.epoch == profile.epoch for other in self.intervals) > 1

    def balance(self, profile: IntervalProfile) -> Balance | None:
        """Returns what perfect balance would have saved in an interval: autoshard's own figure if it decided at its end
        (it accounts for ranks' speeds), else the profile's. None with one rank or no sampled steps.

        The terminal, the page and `explain` all report this figure."""
        if profile.world_size == 1 or profile.samples == 0:
            return None
        decided = [d.get("balance_gain") for d in self.decisions if d.get("step") == profile.end_step]
        return balance_of(profile, decided[-1] if decided else None)

    def metrics_of(self, split: str) -> list[Mapping[str, Any]]:
        return [line for line in self.metrics if line.get("split") == split]

    def final_metrics(self) -> tuple[str, Mapping[str, Any]] | None:
        """Returns the last evaluation: on test data if there is one, else on validation data."""
        for split in ("test", "val"):
            lines = self.metrics_of(split)
            if lines:
                return split, lines[-1]
        return None

    @property
    def stopped_early(self) -> str | None:
        """A sentence for a training run without a result: it failed, was stopped, or is still running."""
        if not self.intervals or self.finished or "train" not in self.config:
            return None
        last_step = self.last.end_step
        seen = max((int(line["step"]) for line in self.metrics if line.get("step") is not None), default=last_step)
        beyond = f" (last metrics: step {seen:,})" if seen > last_step else ""
        return (
            f"The run has not finished: it failed, was stopped or is still running. This report covers it up to step "
            f"{last_step:,}{beyond}, in epoch {self.last.epoch} (from 0) of {self.config['train'].get('epochs', '?')}."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "name": self.name,
            "config": dict(self.config),
            "environment": dict(self.environment),
            "starts": self.starts,
            "epochs": [profile.to_json() for profile in self.intervals],
            "metrics": [dict(line) for line in self.metrics],
            "decisions": [dict(line) for line in self.decisions],
        }


class MetricsRecord(TypedDict, total=False):
    """A line of metrics.jsonl; any other key is another metric."""

    step: Required[Count]
    epoch: Count
    split: str
    logloss: Number | None
    auc: Number | None
    ne: Number | None
    calibration: Number | None
    throughput: Number | None
    step_ms: Number | None
    examples_per_second: Number | None


class DecisionRecord(TypedDict, total=False):
    """Keys of decisions.jsonl that reports read."""

    epoch: Count | None
    step: Count | None
    action: str
    text: str | None
    predicted_gain: Number | None
    balance_gain: Number | None
    measured_gain: Number | None
    measured_low: Number | None
    measured_high: Number | None
    doubt: str | None
    bytes_moved: Count | None
    moves: list[MoveRecord] | None
    decide_seconds: Number | None
    move_seconds: Number | None
    paid_back_after_steps: Number | None
    error_before: Number | None
    error_after: Number | None
    throughput_before: Number | None


class TrainKeys(TypedDict, total=False):
    """Keys of the config's `train` section that a report reads."""

    epochs: Count


class ProfileKeys(TypedDict, total=False):
    """Keys of the config's `profile` section that a report reads."""

    enabled: bool


class ConfigKeys(TypedDict, total=False):
    """Keys of a config that a report reads; they stay readable when the config's schema changes."""

    train: TrainKeys
    profile: ProfileKeys


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    config = shown(read_yaml(path, "config file"))
    try:
        return {**checked(ConfigKeys, config or {}, extra="allow")}
    except FormatError as error:
        raise ReportError(f"config file '{path}': {error}") from error


def _object(path: Path, what: str) -> dict[str, Any]:
    """Reads an optional JSON object; {} if it is missing or damaged."""
    try:
        found = shown(parse_json(read_bytes(path, what)))
    except NotReadable:
        return {}
    return found if isinstance(found, dict) else {}


def _seconds(path: Path) -> dict[str, float]:
    found = _object(path, "result").get("seconds")
    return {k: v for k, v in found.items() if isinstance(v, (int, float))} if isinstance(found, dict) else {}


def _budget(path: Path) -> tuple[int, ...]:
    found = read_records(path, lambda line: line.get("budget_bytes"))
    known = found[-1] if found else None
    return tuple(known) if isinstance(known, list) and all(isinstance(one, int) for one in known) else ()


def _replicated(run_dir: Path) -> tuple[TableConfig, ...]:
    try:
        return replicated_in(run_dir)
    except FormatError as error:
        raise ReportError(str(error)) from error


def _of_kind(kind: Any) -> Callable[[Any], Mapping[str, Any]]:
    return lambda line: {**checked(kind, line, extra="allow")}


def _why_nothing(run_dir: Path, config: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    there = sorted(path.name + ("/" if path.is_dir() else "") for path in run_dir.iterdir() if path.name[0] != ".")
    if not there:
        return f"'{run_dir}' is empty: nothing to report. Name the directory of a run (<run.dir>/<run.name>)."
    if not config and not metrics:
        return (
            f"'{run_dir}' is not a run directory: it has no config.yaml, metrics.jsonl or costs/epochs.jsonl, "
            f"only {_some(there)}. Name the directory of a run (<run.dir>/<run.name>)."
        )
    reached = f", and metrics up to step {metrics[-1].get('step')}" if metrics else ""
    return (
        f"'{run_dir}' has no complete epoch yet: the run was stopped in its first epoch, or is still in it. "
        f"It has {_some(there)}{reached}. Continue it with --resume; a report needs one complete epoch."
    )


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
