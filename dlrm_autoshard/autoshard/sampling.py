"""Which steps are timed, and when what they show ends an interval before its time.

sampling.is_sampled(step)              # every so many; more often while a change is suspected or measured
sampling.see(step, stages_W4, ms)      # of each sampled step, the same on every rank
sampling.is_due(step, samples)         # a change is seen: `cut`; or enough was measured since: decide, then `decided`
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.change_watch import ChangeWatch
from dlrm_autoshard.config import ProfileConfig


def steps_of_part(epoch: int, total: int) -> int:
    """Steps of an interval, where nobody says how many: an epoch, or one of its equal parts. epoch, total: steps of
    one, and of the job."""
    longest = max(thresholds.LONG_INTERVAL, total / thresholds.MANY_INTERVALS)
    return math.ceil(epoch / max(1, math.ceil(epoch / longest)))


@dataclass
class Change:
    """at: the step after which it was first seen. decide_at: when it is decided on once more, after it was decided that
    tables stay: what has lasted twice as long may pay for a dearer move."""

    at: int
    decide_at: int | None = None


class Sampling:
    def __init__(self, profile: ProfileConfig, watch: ChangeWatch | None) -> None:
        """watch: None where intervals have their whole time."""
        self._profile, self._watch = profile, watch
        self._begun = self._seen_at = 0
        self._change: Change | None = None  # in this interval
        self.noticed = ""  # of the last change, in words

    def begin(self, step: int) -> None:
        """Training starts, or starts again, with this step; the first are to warm up."""
        self._begun = step

    def is_sampled(self, step: int) -> bool:
        hurried = max(2, self._profile.every_steps // 4)
        return self.in_rhythm(step) or (self._hurries and self._falls_on(step, hurried))

    def in_rhythm(self, step: int) -> bool:
        """Whether it is sampled in any case."""
        return self._falls_on(step, self._profile.every_steps)

    def see(self, step: int, stages_W4: np.ndarray, step_ms: float) -> None:
        """Of a sampled step, after so many in all: as `ChangeWatch.see` takes it. Needed where it `watches`."""
        if self._watch is not None:
            self._watch.see(stages_W4, step_ms)
            if self._watch.since == 1:
                self._seen_at = step

    @property
    def watches(self) -> bool:
        return self._watch is not None

    def is_due(self, step: int, samples: int) -> bool:
        """After so many steps in all, of which this interval has timed `samples`."""
        if self._change is None:
            return self._watch is not None and self._watch.changed
        return samples >= thresholds.SAMPLES_OF_CHANGE and step >= (self._change.decide_at or 0)

    def cut(self) -> int | None:
        """Where a change has just been seen: how many of the last sampled steps show it, which the next interval is to
        be of. None where there is something to decide on."""
        if self._watch is None or self._change is not None:
            return None
        self._change, self.noticed = Change(self._seen_at), self._watch.text
        return self._watch.since

    def changed_steps(self, step: int) -> int | None:
        """For which a change in this interval has lasted."""
        return None if self._change is None else step - self._change.at

    def decided(self, step: int, *, early: bool, moved: bool) -> None:
        """early: the interval ended before its time."""
        if self._watch is not None and (moved or self._change is not None):
            self._watch.settle()
        if moved or not early:
            self._change = None
        elif self._change is not None:
            self._change.decide_at = step + (step - self._change.at)

    @property
    def _hurries(self) -> bool:
        if self._change is not None:
            return self._change.decide_at is None
        return self._watch is not None and self._watch.suspects

    def _falls_on(self, step: int, every: int) -> bool:
        due = step - self._begun - self._profile.warmup_steps
        return self._profile.enabled and due >= 0 and due % every == 0
