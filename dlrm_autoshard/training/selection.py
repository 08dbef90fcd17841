"""Chooses by evaluations on the val split which checkpoint is kept as the best, and when training ends early.

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
    """Best value of one metric so far. value: None before the first evaluation that has it. worse: evaluations since
    the best one."""

    metric: ChoiceMetric
    value: float | None = None
    step: int = -1
    worse: int = 0
    seen_step: int = -1

    def improves(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether these metrics are the best so far, or are the best and known."""
        new = metrics.get(self.metric)
        if new is None or step <= self.seen_step:
            return new is not None and step == self.step
        if self.value is None:
            return True
        return new > self.value if self.metric == "auc" else new < self.value

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Once a step: what was evaluated again after a restart counts no second time."""
        if step <= self.seen_step or self.metric not in metrics:
            return
        if self.improves(step, metrics):
            self.value, self.step, self.worse = metrics[self.metric], step, 0
        else:
            self.worse += 1
        self.seen_step = step


class Selection:
    """kept: what the best checkpoint is chosen by. None where nothing is chosen."""

    def __init__(self, keep_best: ChoiceMetric | None = None, early_stopping: EarlyStopping | None = None) -> None:
        self.kept = BestSoFar(keep_best) if keep_best else None
        self.watched = BestSoFar(early_stopping.metric) if early_stopping else None
        self.patience = early_stopping.patience if early_stopping else 0

    @property
    def wanted(self) -> bool:
        return self.kept is not None or self.watched is not None

    @property
    def best(self) -> BestSoFar | None:
        """The evaluation by which a job is judged: the kept checkpoint's before the one that training would end by."""
        return next((best for best in (self.kept, self.watched) if best is not None and best.value is not None), None)

    @property
    def stop(self) -> bool:
        """Whether the last `patience` evaluations were no better than the one before them."""
        return self.watched is not None and self.watched.worse >= self.patience

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        for best in filter(None, (self.kept, self.watched)):
            best.add(step, metrics)

    def state_dict(self) -> dict[str, Any]:
        return {key: asdict(best) for key, best in self._parts().items() if best is not None}

    def load_state_dict(self, state: Mapping[str, Any], best_step: int | None) -> None:
        """best_step: of the checkpoint that is there as the best. Where it is another, the next evaluation's is. A
        metric that the config no longer names is forgotten."""
        for key, best in self._parts().items():
            saved = state.get(key)
            if best is not None and saved is not None and saved["metric"] == best.metric:
                setattr(self, key, made(BestSoFar, saved))
        if self.kept is not None and self.kept.step != best_step:
            self.kept = BestSoFar(self.kept.metric)

    def _parts(self) -> dict[str, BestSoFar | None]:
        return {"kept": self.kept, "watched": self.watched}
