"""Chooses which steps are timed, and notices in mid-interval that ranks wait for one another otherwise than they did.

watch.is_sampled(step)                        # the fewer the longer nothing changes; more while a change is suspected
watch.timed(step), watch.see(step, stages_W4, ms)     # of each sampled step, the same on every rank
watch.is_due(step, samples)                   # a change is seen: `cut`; or enough was measured since: decide, `decided`
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.config import ProfileConfig
from dlrm_autoshard.costs import COMPUTE, IQR_OF_NORMAL, balance_gains

_KEPT = ("_timed_at", "_due_at", "_alike_since", "_interval", "_cut_at", "_seen_at", "_moved")


def steps_of_part(epoch: int, total: int) -> int:
    """Steps of an interval, where nobody says how many: an epoch, or one of its equal parts. epoch, total: steps of
    one, and of the job."""
    longest = max(thresholds.LONG_INTERVAL, total / thresholds.MANY_INTERVALS)
    return math.ceil(epoch / max(1, math.ceil(epoch / longest)))


@dataclass
class Change:
    """at: the step after which it was first seen. decide_at: when it may be decided on; after a decision, when it has
    lasted twice as long, for then more is known of it, and a costlier move may pay. moves: that were made since."""

    at: int
    decide_at: int = 0
    moves: int = 0


class Watch:
    """Two cumulative sums (CUSUM; Page 1954, Biometrika 41) of how far two parts of a step lie above the usual: what
    perfect balance would save, and how far ranks' computing is from where it usually is beside one another (where a
    slow rank recovers, balance may save as much as before, of other ranks). Both are of each step by itself, so that a
    machine that is slower as a whole changes nothing.
    """

    def __init__(self, profile: ProfileConfig, min_gain: float | None) -> None:
        """min_gain: smaller changes, as parts of a step, are none; None where intervals have their whole time."""
        self._profile, self.watches = profile, min_gain is not None
        self._least = max(min_gain or 0.0, thresholds.USUAL_SCATTER)
        self._begun = self._seen_at = self._timed_at = 0
        self._due_at = self._alike_since = 0  # the next step to sample in any case; the first after the last change
        self._interval = 1e9  # steps of the last whole one
        self._cut_at = -1
        self._change: Change | None = None  # in this interval
        self._moved = False  # since the job began
        self.noticed = ""  # of the last change, in words
        self._usual: deque[np.ndarray] = deque(maxlen=thresholds.SAMPLES_OF_USUAL)
        self._unusual: list[np.ndarray] = []
        self._sums_2 = np.zeros(2)

    def begin(self, step: int) -> None:
        """Training starts, or starts again, with this step; the first are to warm up."""
        self._begun = step
        if self._timed_at == 0:
            self._alike_since = step

    # -- which steps are timed -----------------------------------------------------------------------------------------

    def is_sampled(self, step: int) -> bool:
        hurried = self._hurried(step)
        return self._warm(step) and (step >= self._due_at or (hurried > 0 and step + 1 >= self._timed_at + hurried))

    def timed(self, step: int) -> bool:
        """Counts a sampled step, after so many in all. Returns whether it would have been sampled in any case."""
        self._timed_at, regular = step, step > self._due_at
        if regular:
            self._due_at = step - 1 + self._usual_distance(step)
        return regular

    def ended(self, steps: int) -> None:
        """A whole interval, of so many steps."""
        self._interval = steps

    def _usual_distance(self, step: int) -> int:
        """Steps from one sampled step to the next. After t unchanged steps the median wait for the next change is t
        more; samples that are k steps apart see it k / 2 steps late. That and what samples cost are least together with
        k ~ sqrt(t)."""
        if self._profile.every_steps is not None:
            return self._profile.every_steps
        apart = max(thresholds.SAMPLED_APART, 2 * math.sqrt(max(0, step - self._alike_since)))
        return max(self._distance(4), int(min(apart, self._interval / thresholds.SAMPLES_OF_INTERVAL)))

    def _hurried(self, step: int) -> int:
        """Steps from one sampled step to the next where they are fewer than usual, else 0: while a change is suspected,
        after it, and after a move, until it is known how ranks wait for one another now."""
        if not self.watches or not self._warm(step):
            return 0
        if self._change is not None:  # enough are new each time that it has lasted twice as long
            least = self._distance(4 if self._change.moves else 10)
            return max(least, (step - self._change.at) // (2 * thresholds.SAMPLES_OF_CHANGE))
        if self._sums_2.max() >= thresholds.CHANGED / 3:  # what one step that is far off shows: others cost too much
            return self._distance(10)
        return self._distance(4) if self._moved and self.learns else 0

    def _distance(self, part: int) -> int:
        """Steps, a part of the usual distance. However near they are, about as many show that a change is none."""
        return max(2, (self._profile.every_steps or thresholds.SAMPLED_APART) // part)

    def _warm(self, step: int) -> bool:
        return self._profile.enabled and step >= self._begun + self._profile.warmup_steps

    # -- what they show ------------------------------------------------------------------------------------------------

    def see(self, step: int, stages_W4: np.ndarray, step_ms: float) -> bool:
        """A sampled step: ms of PLANNED_STAGES on each rank, and of the whole step. Returns whether it is the first
        that suggests a change."""
        if not self.watches:
            return False
        seen = _seen(stages_W4, step_ms)
        if self.learns:
            self._usual.append(seen)
            return False
        middle_K, parts_2, scatter_2 = self._usual_parts()
        away_2 = (_parts([seen], middle_K)[0] - parts_2) / scatter_2
        # A step counts for what it lies above one standard deviation, and never for more than two more: one that
        # something else disturbed is not enough.
        self._sums_2 = np.maximum(0.0, self._sums_2 + np.minimum(away_2 - 1.0, 2.0))
        if not self.suspects:
            self._usual.extend([*self._unusual, seen])
            self._unusual.clear()
            return False
        self._unusual.append(seen)
        if len(self._unusual) == 1:
            self._seen_at = step
        return len(self._unusual) == 1

    @property
    def learns(self) -> bool:
        """Whether too little is known of what is usual."""
        return self.watches and len(self._usual) < thresholds.LEAST_SAMPLES

    @property
    def suspects(self) -> bool:
        """Whether the last sampled steps suggest a change."""
        return bool(self._sums_2.any())

    def is_due(self, step: int, samples: int) -> bool:
        """Whether the interval should end before its time, after so many steps in all, of which it has timed
        `samples`: a change has just been seen, or enough has been measured since."""
        if self._change is None or self._sees_another:
            return self._sees_another
        looked = self._timed_at > self._cut_at  # at ids, too: what tables look up is counted anew from there
        return looked and samples >= thresholds.SAMPLES_OF_CHANGE and step >= self._change.decide_at

    def cut(self) -> int | None:
        """Where a change has just been seen: how many of the last sampled steps show it, which the next interval is to
        be of. None where there is something to decide on."""
        if not self._sees_another:
            return None
        self._change, self.noticed, self._cut_at = Change(self._seen_at), self._text(), self._timed_at
        self._changed(self._seen_at)
        return len(self._unusual)

    def since_change(self, step: int) -> tuple[int | None, int]:
        """Steps for which a change in this interval has lasted, and moves that were made since."""
        return (None, 0) if self._change is None else (step - self._change.at, self._change.moves)

    def decided(self, step: int, *, early: bool, moved: bool) -> None:
        """early: the interval ended before its time. What was seen since the change, if it lasts, is the usual from now
        on; after a move nothing is."""
        self._moved |= moved
        self._timed_at = step  # the next is some steps away: the first after a move are slow
        if moved:
            self._changed(step)
            self._learn([])
        elif self._change is not None:
            self._learn(self._unusual if self.changed else [*self._usual, *self._unusual])
        if not early:
            self._change = None
        elif self._change is not None:
            self._change.decide_at = step + (step - self._change.at)
            self._change.moves += moved

    def _learn(self, usual: Sequence[np.ndarray]) -> None:
        self._usual = deque(usual, maxlen=thresholds.SAMPLES_OF_USUAL)
        self._unusual, self._sums_2 = [], np.zeros(2)

    def _usual_parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The middle of what is usually seen; middle and standard deviation of its `_parts`, wider of few steps."""
        middle_K, count = np.median(self._usual, axis=0), len(self._usual)
        low_2, middle_2, high_2 = np.quantile(_parts(self._usual, middle_K), [0.25, 0.5, 0.75], axis=0)
        of_few = math.sqrt(1 + 1 / count) * (1 + 1.2 / (count - 2))  # Student's t, about
        return middle_K, middle_2, np.maximum((high_2 - low_2) / IQR_OF_NORMAL, self._least) * of_few

    @property
    def changed(self) -> bool:
        """Whether the last sampled steps surely show a change."""
        return bool(self._sums_2.max() >= thresholds.CHANGED)

    @property
    def _sees_another(self) -> bool:
        """A change, beside one that has been decided on."""
        known = self._change is not None and self._change.decide_at == 0
        return self.changed and not known

    def _changed(self, step: int) -> None:
        self._alike_since = step
        self._due_at = min(self._due_at, self._timed_at + self._usual_distance(step))

    def _text(self) -> str:
        """'perfect balance would now save 31% of the step, where it was 4%'"""
        now, then = np.median(self._unusual, axis=0), np.median(self._usual, axis=0)
        if self._sums_2[0] >= thresholds.CHANGED:
            return f"perfect balance would now save {now[0]:.0%} of the step, where it was {max(then[0], 0.0):.0%}"
        moved_W = (now - then)[1:]
        more, less = int(moved_W.argmax()), int(moved_W.argmin())  # of two ranks, by as much: then who is waited for
        rank = more if moved_W[more] > -0.99 * moved_W[less] else less
        less_or_more = "less" if moved_W[rank] < 0 else "more"
        return f"beside the others rank {rank} now computes for {abs(moved_W[rank]):.0%} of the step {less_or_more}"

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _KEPT},
            "change": None if self._change is None else asdict(self._change),
            "usual": [seen.tolist() for seen in self._usual],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _KEPT:
            setattr(self, name, state[name])
        self._change = None if state["change"] is None else Change(**state["change"])
        self._learn([np.array(seen) for seen in state["usual"]])


def _seen(stages_W4: np.ndarray, step_ms: float) -> np.ndarray:
    """[1 + W], parts of the step: what perfect balance would save, and how much longer each rank computes than they do
    in the mean."""
    compute_W = stages_W4[:, COMPUTE].sum(axis=1)
    away_W = (compute_W - compute_W.mean()) / max(step_ms, 1e-9)
    return np.concatenate([[balance_gains(stages_W4, step_ms)], away_W])


def _parts(seen: Sequence[np.ndarray], middle_K: np.ndarray) -> np.ndarray:
    """[N, 2] what is summed up, of N steps. middle_K: of the usual ones."""
    seen_NK = np.stack(seen)
    return np.stack([seen_NK[:, 0], np.abs(seen_NK - middle_K)[:, 1:].sum(axis=1) / 2], axis=1)
