"""Chooses which steps are timed, and notices in mid-interval that ranks wait for one another otherwise than they did.

watch.is_sampled(step)                                # the fewer the longer nothing changes; more while in doubt
watch.timed(step), watch.see(stages_W4, ms)           # of each sampled step, the same on every rank
watch.is_due(samples), watch.noticed                  # a change is seen: decide now, then `watch.decided`
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.config import ProfileConfig
from dlrm_autoshard.costs import COMPUTE, IQR_OF_NORMAL, balance_gains

_KEPT = ("_timed_at", "_due_at", "_alike_since", "_interval", "_moved")


def steps_of_part(epoch: int, total: int) -> int:
    """Returns the steps of an interval by default: an epoch, or one of its equal parts. epoch, total: steps of an
    epoch, and of the job."""
    longest = max(thresholds.LONG_INTERVAL, total / thresholds.MANY_INTERVALS)
    return math.ceil(epoch / max(1, math.ceil(epoch / longest)))


class Watch:
    """Compares two quantities of each sampled step with their usual values: what perfect balance would save, and how
    far ranks' relative computing times are from usual (when a slow rank recovers, balance may save as much as
    before, on other ranks). Both are relative within a step, so a machine that is slower as a whole changes nothing."""

    def __init__(self, profile: ProfileConfig, min_gain: float | None) -> None:
        """min_gain: smaller changes, as fractions of the step, do not count; None: intervals are never cut short."""
        self._profile, self.watches = profile, min_gain is not None
        self._least = max(min_gain or 0.0, thresholds.USUAL_SCATTER)
        self._begun = self._timed_at = 0
        self._due_at = self._alike_since = 0  # the next step to sample in any case; the first after the last change
        self._interval = 1e9  # steps of the last whole one
        self._moved = False  # since the job began
        self._usual: deque[np.ndarray] = deque(maxlen=thresholds.SAMPLES_OF_USUAL)
        self._unusual: list[np.ndarray] = []  # the last sampled steps, as far as they are

    def begin(self, step: int) -> None:
        """Starts, or restarts, training at this step; the first steps are warm-up."""
        self._begun = step
        if self._timed_at == 0:
            self._alike_since = step

    # -- which steps are timed -----------------------------------------------------------------------------------------

    def is_sampled(self, step: int) -> bool:
        if not self._profile.enabled or step < self._begun + self._profile.warmup_steps:
            return False
        return step >= self._due_at or (self._hurries and step + 1 >= self._timed_at + self._hurried())

    def timed(self, step: int) -> bool:
        """Counts a sampled step, after so many steps in all. Returns whether it was a regular sample."""
        self._timed_at, regular = step, step > self._due_at
        if regular:
            self._due_at = step - 1 + self._usual_distance(step)
        return regular

    def ended(self, steps: int) -> None:
        """Counts a whole interval of so many steps."""
        self._interval = steps

    def _usual_distance(self, step: int) -> int:
        """Returns the steps between samples. After t unchanged steps the median wait for the next change is t more,
        and samples k steps apart see it k / 2 steps late. The sum of that delay and the cost of samples is least for
        k ~ sqrt(t)."""
        if self._profile.every_steps is not None:
            return self._profile.every_steps
        apart = max(thresholds.SAMPLED_APART, 2 * math.sqrt(max(0, step - self._alike_since)))
        return max(self._distance(4), int(min(apart, self._interval / thresholds.SAMPLES_OF_INTERVAL)))

    @property
    def _hurries(self) -> bool:
        """Returns whether more steps than usual are sampled: in doubt, and after a move until usual values are known
        again."""
        return bool(self._unusual) or (self._moved and self.learns)

    def _hurried(self) -> int:
        """Returns the steps between samples then."""
        return self._distance(10 if self._unusual else 4)

    def _distance(self, part: int) -> int:
        return max(2, (self._profile.every_steps or thresholds.SAMPLED_APART) // part)

    # -- what they show ------------------------------------------------------------------------------------------------

    def see(self, stages_W4: np.ndarray, step_ms: float) -> bool:
        """Takes a sampled step's ms of PLANNED_STAGES on each rank and of the whole step. Returns whether it is the
        first that suggests a change."""
        if not self.watches:
            return False
        seen = _seen(stages_W4, step_ms)
        if not self.learns and self._is_unusual(seen):
            self._unusual.append(seen)
            return len(self._unusual) == 1
        self._usual.extend([*self._unusual, seen])
        self._unusual = []
        return False

    @property
    def learns(self) -> bool:
        """Returns whether the usual values are still unknown."""
        return self.watches and len(self._usual) < thresholds.LEAST_SAMPLES

    @property
    def changed(self) -> bool:
        """Returns whether enough sampled steps in a row show a change; a disturbed one does not."""
        return len(self._unusual) >= thresholds.SAMPLES_OF_CHANGE

    def is_due(self, samples: int) -> bool:
        """Returns whether the interval, with so many sampled steps, should be cut short."""
        return self.changed and samples >= thresholds.SAMPLES_OF_CHANGE

    @property
    def unusual(self) -> int:
        """Number of the latest sampled steps that show a change."""
        return len(self._unusual)

    def decided(self, step: int, *, moved: bool) -> None:
        """Takes the values since a change, if it lasts, as usual from now on; after a move nothing is usual yet."""
        if moved or self.changed:
            self._usual = deque([] if moved else self._unusual, maxlen=thresholds.SAMPLES_OF_USUAL)
            self._unusual, self._alike_since = [], step
            self._due_at = min(self._due_at, step - 1 + self._usual_distance(step))
        self._moved |= moved
        self._timed_at = step  # the next is some steps away: the first after a move are slow

    def _is_unusual(self, seen: np.ndarray) -> bool:
        """Returns whether a quantity exceeds its usual value by `CHANGED` standard deviations, which are wider for
        few steps."""
        middle_K, count = np.median(self._usual, axis=0), len(self._usual)
        low_2, middle_2, high_2 = np.quantile(_parts(self._usual, middle_K), [0.25, 0.5, 0.75], axis=0)
        of_few = math.sqrt(1 + 1 / count) * (1 + 1.2 / (count - 2))  # Student's t, about
        scatter_2 = np.maximum((high_2 - low_2) / IQR_OF_NORMAL, self._least) * of_few
        above_2 = (_parts([seen], middle_K)[0] - middle_2) / scatter_2
        return bool(above_2.max() >= thresholds.CHANGED)

    @property
    def noticed(self) -> str:
        """Returns 'perfect balance would now save 31% of the step, where it was 4%'."""
        now, then = np.median(self._unusual, axis=0), np.median(self._usual, axis=0)
        if now[0] - then[0] >= self._least:
            return f"perfect balance would now save {now[0]:.0%} of the step, where it was {max(then[0], 0.0):.0%}"
        moved_W = (now - then)[1:]
        more, less = int(moved_W.argmax()), int(moved_W.argmin())  # of two ranks, by as much: then who is waited for
        rank = more if moved_W[more] > -0.99 * moved_W[less] else less
        less_or_more = "less" if moved_W[rank] < 0 else "more"
        return f"beside the others rank {rank} now computes for {abs(moved_W[rank]):.0%} of the step {less_or_more}"

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _KEPT}, "usual": [seen.tolist() for seen in self._usual]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _KEPT:
            setattr(self, name, state[name])
        self._usual, self._unusual = deque(map(np.array, state["usual"]), maxlen=thresholds.SAMPLES_OF_USUAL), []


def _seen(stages_W4: np.ndarray, step_ms: float) -> np.ndarray:
    """Returns [1 + W] fractions of the step: what perfect balance would save, and how much longer than average each
    rank computes."""
    compute_W = stages_W4[:, COMPUTE].sum(axis=1)
    away_W = (compute_W - compute_W.mean()) / max(step_ms, 1e-9)
    return np.concatenate([[balance_gains(stages_W4, step_ms)], away_W])


def _parts(seen: Sequence[np.ndarray], middle_K: np.ndarray) -> np.ndarray:
    """Returns [N, 2], what is compared, of N steps. middle_K: medians of usual steps."""
    seen_NK = np.stack(seen)
    return np.stack([seen_NK[:, 0], np.abs(seen_NK - middle_K)[:, 1:].sum(axis=1) / 2], axis=1)
