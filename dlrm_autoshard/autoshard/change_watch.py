"""Tells in mid-interval, from sampled steps as they come, that ranks wait for one another otherwise than they did.

watch.see(stages_W4, step_ms)       # of each sampled step, the same on every rank
watch.suspects                      # the last ones say so: steps should be sampled more often
watch.changed, watch.since          # they surely say so; how many they are
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.costs import COMPUTE, IQR_OF_NORMAL, balance_gains


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
        self.restart()

    def restart(self) -> None:
        """What comes now is the usual, whatever was before: tables have moved."""
        self._usual: deque[np.ndarray] = deque(maxlen=4 * thresholds.SAMPLES_OF_CHANGE)  # as `_seen` makes them
        self._unusual: list[np.ndarray] = []
        self._sums_2 = np.zeros(2)

    def settle(self) -> None:
        """What has been seen since the change, if it lasts, is the usual from now on: tables have stayed."""
        known = self._unusual or list(self._usual)
        self.restart()
        self._usual.extend(known)

    def see(self, stages_W4: np.ndarray, step_ms: float) -> None:
        """A sampled step: ms of PLANNED_STAGES on each rank, and of the whole step."""
        seen = _seen(stages_W4, step_ms)
        if self.learns:
            self._usual.append(seen)
            return
        middle = np.median(self._usual, axis=0)
        usual_N2, now_2 = _parts(self._usual, middle), _parts([seen], middle)[0]
        low_2, middle_2, high_2 = np.quantile(usual_N2, [0.25, 0.5, 0.75], axis=0)
        scatter_2 = np.maximum((high_2 - low_2) / IQR_OF_NORMAL, self._least) * _of_few(len(self._usual))
        # A step counts for what it lies above one standard deviation, and never for more than two more: one that
        # something else disturbed is not enough.
        self._sums_2 = np.maximum(0.0, self._sums_2 + np.minimum((now_2 - middle_2) / scatter_2 - 1.0, 2.0))
        if self.suspects:
            self._unusual.append(seen)
        else:
            self._usual.extend([*self._unusual, seen])
            self._unusual.clear()

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
        then, now = (np.median(seen, axis=0) for seen in (self._usual, self._unusual))
        if self._sums_2[0] >= thresholds.CHANGED:
            return f"perfect balance would now save {now[0]:.0%} of the step, where it was {max(then[0], 0.0):.0%}"
        moved_W = (now - then)[1:]
        more, less = int(moved_W.argmax()), int(moved_W.argmin())  # of two ranks, by as much: then who is waited for
        rank = more if moved_W[more] > -0.99 * moved_W[less] else less
        less_or_more = "less" if moved_W[rank] < 0 else "more"
        return f"beside the others rank {rank} now computes for {abs(moved_W[rank]):.0%} of the step {less_or_more}"


def _seen(stages_W4: np.ndarray, step_ms: float) -> np.ndarray:
    """[1 + W], parts of the step: what perfect balance would save, and how much longer each rank computes than they do
    in the mean."""
    compute_W = stages_W4[:, COMPUTE].sum(axis=1)
    away_W = (compute_W - compute_W.mean()) / max(step_ms, 1e-9)
    return np.concatenate([[balance_gains(stages_W4, step_ms)], away_W])


def _parts(seen: Sequence[np.ndarray], middle: np.ndarray) -> np.ndarray:
    """[N, 2] what is summed up, of N steps. middle: of the usual ones."""
    seen_NK = np.stack(seen)
    return np.stack([seen_NK[:, 0], np.abs(seen_NK - middle)[:, 1:].sum(axis=1) / 2], axis=1)


def _of_few(count: int) -> float:
    """How much further than a standard deviation estimated from so many steps the next may be: Student's t, about."""
    return float(np.sqrt(1 + 1 / count) * (1 + 1.2 / (count - 2)))
