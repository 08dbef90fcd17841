"""Chooses the best checkpoint, and when to end training early, by evaluations on val.

selection = Selection(keep_best="auc", early_stopping=EarlyStopping(metric="logloss", patience=3))
selection.add(step, metrics)                # the same on every rank, after each evaluation
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dlrm_autoshard.config import ChoiceMetric, EarlyStopping
from dlrm_autoshard.formats.json_file import made


@dataclass
class BestSoFar:
    """The best value of a metric so far. value: None before the first evaluation that has it. worse: evaluations since
    the best."""

    metric: ChoiceMetric
    value: float | None = None
    step: int = -1
    worse: int = 0
    seen_step: int = -1

    def improves(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Returns whether these metrics are the best so far, including the known best itself."""
        new = metrics.get(self.metric)
        if new is None or step <= self.seen_step:
            return new is not None and step == self.step
        if self.value is None:
            return True
        return new > self.value if self.metric == "auc" else new < self.value

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds an evaluation; a step evaluated again after a restart does not count twice."""
        if step <= self.seen_step or self.metric not in metrics:
            return
        if self.improves(step, metrics):
            self.value, self.step, self.worse = metrics[self.metric], step, 0
        else:
            self.worse += 1
        self.seen_step = step


class Selection:
    """Tracks evaluations. kept: chooses the best checkpoint; watched: ends training early; each None if not wanted."""

    def __init__(self, keep_best: ChoiceMetric | None = None, early_stopping: EarlyStopping | None = None) -> None:
        self.kept = BestSoFar(keep_best) if keep_best else None
        self.watched = BestSoFar(early_stopping.metric) if early_stopping else None
        self.patience = early_stopping.patience if early_stopping else 0

    @property
    def wanted(self) -> bool:
        return self.kept is not None or self.watched is not None

    @property
    def best(self) -> BestSoFar | None:
        """The evaluation to judge a job by: the best checkpoint's, else that of early stopping."""
        return next((best for best in (self.kept, self.watched) if best is not None and best.value is not None), None)

    @property
    def stop(self) -> bool:
        """Whether the last `patience` evaluations brought no new best."""
        return self.watched is not None and self.watched.worse >= self.patience

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        for best in filter(None, (self.kept, self.watched)):
            best.add(step, metrics)

    def state_dict(self) -> dict[str, Any]:
        return {key: asdict(best) for key, best in self._parts().items() if best is not None}

    def load_state_dict(self, state: Mapping[str, Any], best_step: int | None) -> None:
        """Restores a state. best_step: of the existing best checkpoint; if it is another, the next evaluation is the
        best. Metrics that the config no longer names are dropped."""
        for key, best in self._parts().items():
            saved = state.get(key)
            if best is not None and saved is not None and saved["metric"] == best.metric:
                setattr(self, key, made(BestSoFar, saved))
        if self.kept is not None and self.kept.step != best_step:
            self.kept = BestSoFar(self.kept.metric)

    def _parts(self) -> dict[str, BestSoFar | None]:
        return {"kept": self.kept, "watched": self.watched}
