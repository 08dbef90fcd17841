"""Which steps are timed, and when what they show ends an interval before its time.

sampling.is_sampled(step)              # the fewer the longer nothing changes; more while a change is suspected
sampling.timed(step), sampling.see(step, stages_W4, ms)    # of each sampled step, the same on every rank
sampling.is_due(step, samples)         # a change is seen: `cut`; or enough was measured since: decide, then `decided`
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.change_watch import ChangeWatch
from dlrm_autoshard.autoshard.decision import Shift
from dlrm_autoshard.config import ProfileConfig

_STEPS_APART, _LEAST_APART, _SAMPLES_OF_INTERVAL = 2.0, 20, 5
"""While nothing suggests a change sampled steps are so many times the root of the steps since the last one apart
(sqrt(2 c / g), where a sampled step is longer by c = 0.2 of a step and a change makes g = 0.1 of each to gain), and so
many steps at least, but so many in an interval: of fewer the quartiles say little."""


def steps_of_part(epoch: int, total: int) -> int:
    """Steps of an interval, where nobody says how many: an epoch, or one of its equal parts. epoch, total: steps of
    one, and of the job."""
    longest = max(thresholds.LONG_INTERVAL, total / thresholds.MANY_INTERVALS)
    return math.ceil(epoch / max(1, math.ceil(epoch / longest)))


@dataclass
class Change:
    """at: the step after which it was first seen. decide_at: when it may be decided on; after a decision, when it has
    lasted twice as long: it may pay for a dearer move then, and more is known of it. moves: that were made since."""

    at: int
    decide_at: int = 0
    moves: int = 0


class Sampling:
    def __init__(self, profile: ProfileConfig, watch: ChangeWatch | None) -> None:
        """watch: None where intervals have their whole time."""
        self._profile, self._watch = profile, watch
        self._begun = self._seen_at = self._timed_at = 0
        self._due_at = self._alike_since = 0  # the next step to sample in any case; the first after the last change
        self._interval = math.inf  # steps of the last whole one
        self._cut_at = -1
        self._change: Change | None = None  # in this interval
        self._moved = False  # since the job began
        self.noticed = ""  # of the last change, in words

    def begin(self, step: int) -> None:
        """Training starts, or starts again, with this step; the first are to warm up."""
        self._begun = step
        if self._timed_at == 0:
            self._alike_since = step

    def is_sampled(self, step: int) -> bool:
        hurried = self._hurried(step)
        return self._warm(step) and (
            step >= self._due_at or (hurried is not None and step + 1 >= self._timed_at + hurried)
        )

    def timed(self, step: int) -> bool:
        """Of a sampled step, after so many in all. Returned: whether it would have been sampled in any case."""
        self._timed_at, regular = step, step > self._due_at
        if regular:
            self._due_at = step - 1 + self._usual(step)
        return regular

    def see(self, step: int, stages_W4: np.ndarray, step_ms: float) -> bool:
        """Of a sampled step, as `ChangeWatch.see` takes it. Needed where it `watches`. Returned: whether it is the
        first that suggests a change."""
        if self._watch is None:
            return False
        self._watch.see(stages_W4, step_ms)
        first = self._watch.since == 1
        if first:
            self._seen_at = step
        return first

    @property
    def watches(self) -> bool:
        return self._watch is not None

    @property
    def learns(self) -> bool:
        """Whether so little was seen since a move that nothing is known of how it was before a change."""
        return self._watch is not None and self._watch.learns

    def is_due(self, step: int, samples: int) -> bool:
        """After so many steps in all, of which this interval has timed `samples`."""
        if self._change is None or self._sees_another:
            return self._sees_another
        looked = self._timed_at > self._cut_at  # at ids, too: what tables look up is counted anew from there
        return looked and samples >= thresholds.SAMPLES_OF_CHANGE and step >= self._change.decide_at

    def cut(self) -> int | None:
        """Where a change has just been seen: how many of the last sampled steps show it, which the next interval is to
        be of. None where there is something to decide on."""
        if self._watch is None or not self._sees_another:
            return None
        self._change, self.noticed, self._cut_at = Change(self._seen_at), self._watch.text, self._timed_at
        self._changed(self._seen_at)
        return self._watch.since

    def since_change(self, step: int) -> tuple[int | None, int]:
        """Steps for which a change in this interval has lasted, and moves that were made since."""
        return (None, 0) if self._change is None else (step - self._change.at, self._change.moves)

    def decided(self, step: int, *, early: bool, moved: bool, shift: Shift | None = None) -> None:
        """early: the interval ended before its time. shift: what the move is expected to change."""
        self._moved |= moved
        self._timed_at = step  # the next is some steps away: the first after a move are slow
        if moved:
            self._changed(step)
        if self._watch is not None and moved:
            self._watch.restart(shift)
        elif self._watch is not None and self._change is not None:
            self._watch.settle()
        if not early:
            self._change = None
        elif self._change is not None:
            self._change.decide_at = step + (step - self._change.at)
            self._change.moves += moved

    def ended(self, steps: int) -> None:
        """A whole interval, of so many steps."""
        self._interval = steps

    @property
    def _sees_another(self) -> bool:
        """A change, beside one that has been decided on."""
        known = self._change is not None and self._change.decide_at == 0
        return self._watch is not None and self._watch.changed and not known

    def _hurried(self, step: int) -> int | None:
        """Steps from one sampled step to the next where they are fewer than usual: while a change is suspected; after a
        move, until it is known how ranks wait for one another now; and since a change, so that enough are new each time
        it has lasted twice as long."""
        if self._watch is None or not self._warm(step):
            return None
        if self._change is not None:
            least = self._closest if self._change.moves else self._next
            return max(least, (step - self._change.at) // (2 * thresholds.SAMPLES_OF_CHANGE))
        if self._watch.suspects:
            return self._next
        return self._closest if self._moved and self._watch.learns else None

    def _usual(self, step: int) -> int:
        """Steps from one sampled step to the next. Of what has lasted for t steps the next change is as far off as not;
        where samples are k steps apart it is seen k / 2 steps late. That and what samples cost are least together
        with k ~ sqrt(t)."""
        if self._profile.every_steps is not None:
            return self._profile.every_steps
        apart = max(_LEAST_APART, _STEPS_APART * math.sqrt(max(0, step - self._alike_since)))
        return max(self._closest, int(min(apart, self._interval / _SAMPLES_OF_INTERVAL)))

    def _changed(self, step: int) -> None:
        self._alike_since = step
        self._due_at = min(self._due_at, self._timed_at + self._usual(step))

    @property
    def _closest(self) -> int:
        """Of steps the first of which may be slow: tables have moved."""
        return max(2, (self._profile.every_steps or _LEAST_APART) // 4)

    @property
    def _next(self) -> int:
        """Of a suspected change, whose every step costs. However near they are, about as many show that it is none."""
        return max(2, (self._profile.every_steps or _LEAST_APART) // 10)

    def _warm(self, step: int) -> bool:
        return self._profile.enabled and step >= self._begun + self._profile.warmup_steps
