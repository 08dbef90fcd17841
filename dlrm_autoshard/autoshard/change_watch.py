"""Tells in mid-interval, from sampled steps as they come, that ranks wait for one another otherwise than they did.

watch.see(stages_W4, step_ms)       # of each sampled step, the same on every rank
watch.suspects                      # the last ones say so: steps should be sampled more often
watch.changed, watch.since          # they surely say so; how many they are
watch.restart(shift)                # tables have moved; what that was expected to change
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.decision import Shift, seen_of
from dlrm_autoshard.costs import IQR_OF_NORMAL


class _Usual(NamedTuple):
    """What is `seen_of` a step, and middle and standard deviation of its `_parts`."""

    seen_K: np.ndarray
    parts_2: np.ndarray
    scatter_2: np.ndarray


class ChangeWatch:
    """Two cumulative sums (CUSUM; Page 1954, Biometrika 41), of how far two parts of a step lie above what is usual:

    - what perfect balance would save;
    - how far ranks' computing is from where it usually is beside one another. Where a slow rank recovers, the others
      may be as much slower than it as it was before: balance would save as much, of other ranks.

    Both are of each step by itself, so that a machine that is slower as a whole changes nothing.
    """

    def __init__(self, min_gain: float) -> None:
        """min_gain: part of a step; smaller changes are none."""
        self._least = max(min_gain, thresholds.USUAL_SCATTER)
        self._begin([])

    def restart(self, shift: Shift | None = None) -> None:
        """What comes now is the usual, whatever was before: tables have moved. shift: what that was expected to change.
        The first steps are far from usual where they are far from that: something changed as the tables moved."""
        known, expected = self._now, None
        if shift is not None and len(known) >= thresholds.LEAST_SAMPLES:
            before, by_K = self._usual_of(known), np.array(shift.by_K)
            parts_2 = before.parts_2 + np.array([by_K[0], 0.0])
            expected = _Usual(before.seen_K + by_K, parts_2, np.hypot(before.scatter_2, shift.uncertainty))
        self._begin([], expected)

    def settle(self) -> None:
        """What has been seen since the change, if it lasts, is the usual from now on: tables have stayed."""
        self._begin(self._now)

    def _begin(self, usual: Sequence[np.ndarray], expected: _Usual | None = None) -> None:
        """usual: steps as `seen_of` makes them."""
        self._usual = deque(usual, maxlen=4 * thresholds.SAMPLES_OF_CHANGE)
        self._unusual: list[np.ndarray] = []
        self._sums_2 = np.zeros(2)
        self._expected = expected

    def see(self, stages_W4: np.ndarray, step_ms: float) -> None:
        """A sampled step: ms of PLANNED_STAGES on each rank, and of the whole step."""
        seen = seen_of(stages_W4, step_ms)
        usual = self._expected if self.learns else self._usual_of(self._usual)
        if usual is None:
            self._usual.append(seen)
            return
        away_2 = (_parts([seen], usual.seen_K)[0] - usual.parts_2) / usual.scatter_2
        # A step counts for what it lies above one standard deviation, and never for more than two more: one that
        # something else disturbed is not enough.
        self._sums_2 = np.maximum(0.0, self._sums_2 + np.minimum(away_2 - 1.0, 2.0))
        if self.suspects:
            self._unusual.append(seen)
        else:
            self._usual.extend([*self._unusual, seen])
            self._unusual.clear()
        if self._expected is not None and not self.changed:
            known = [*self._usual, *self._unusual]
            if not self.learns or len(known) >= 2 * thresholds.LEAST_SAMPLES:  # not as expected, but nearly
                self._begin(known)

    @property
    def learns(self) -> bool:
        """Whether too little is known of what is usual."""
        return len(self._usual) < thresholds.LEAST_SAMPLES

    @property
    def suspects(self) -> bool:
        return bool(self._sums_2.any())

    @property
    def changed(self) -> bool:
        return bool(self._sums_2.max() >= thresholds.CHANGED)

    @property
    def since(self) -> int:
        """Sampled steps since the change."""
        return len(self._unusual)

    @property
    def text(self) -> str:
        """'perfect balance would now save 31% of the step, where it was 4%'"""
        now = np.median(self._unusual, axis=0)
        then = np.median(self._usual, axis=0) if self._expected is None else self._expected.seen_K
        was, than_expected = ("was", "") if self._expected is None else ("was to be", " than expected")
        if self._sums_2[0] >= thresholds.CHANGED:
            return f"perfect balance would now save {now[0]:.0%} of the step, where it {was} {max(then[0], 0.0):.0%}"
        moved_W = (now - then)[1:]
        more, less = int(moved_W.argmax()), int(moved_W.argmin())  # of two ranks, by as much: then who is waited for
        rank = more if moved_W[more] > -0.99 * moved_W[less] else less
        less_or_more = ("less" if moved_W[rank] < 0 else "more") + than_expected
        return f"beside the others rank {rank} now computes for {abs(moved_W[rank]):.0%} of the step {less_or_more}"

    @property
    def _now(self) -> list[np.ndarray]:
        """Steps as they have been since the change, if there is one, else since the move: a few that only suggest one
        are like the others."""
        return self._unusual if self.changed else [*self._usual, *self._unusual]

    def _usual_of(self, known: Sequence[np.ndarray]) -> _Usual:
        middle_K = np.median(known, axis=0)
        low_2, middle_2, high_2 = np.quantile(_parts(known, middle_K), [0.25, 0.5, 0.75], axis=0)
        scatter_2 = np.maximum((high_2 - low_2) / IQR_OF_NORMAL, self._least) * _of_few(len(known))
        return _Usual(middle_K, middle_2, scatter_2)


def _parts(seen: Sequence[np.ndarray], middle: np.ndarray) -> np.ndarray:
    """[N, 2] what is summed up, of N steps. middle: of the usual ones."""
    seen_NK = np.stack(seen)
    return np.stack([seen_NK[:, 0], np.abs(seen_NK - middle)[:, 1:].sum(axis=1) / 2], axis=1)


def _of_few(count: int) -> float:
    """How much further than a standard deviation estimated from so many steps the next may be: Student's t, about."""
    return float(np.sqrt(1 + 1 / count) * (1 + 1.2 / (count - 2)))
