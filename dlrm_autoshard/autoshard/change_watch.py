"""Tells in mid-interval, from sampled steps as they come, that ranks wait for one another by more than they did.

watch.see(stages_W4, step_ms)       # of each sampled step, the same on every rank
watch.suspects                      # the last ones say so: steps should be sampled more often
watch.changed, watch.since          # they surely say so; how many they are
"""

from __future__ import annotations

from collections import deque

import numpy as np

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.costs import IQR_OF_NORMAL, balance_gains


class ChangeWatch:
    """A cumulative sum (CUSUM; Page 1954, Biometrika 41) of how far what perfect balance would save lies above what is
    usual: of each step by itself, so that a machine that is slower as a whole changes nothing."""

    def __init__(self, min_gain: float) -> None:
        """min_gain: part of a step; smaller changes are none."""
        self._least = max(min_gain, thresholds.USUAL_SCATTER)
        self.restart()

    def restart(self) -> None:
        """What comes now is the usual, whatever was before: tables have moved."""
        self._usual: deque[float] = deque(maxlen=4 * thresholds.SAMPLES_OF_CHANGE)
        self._unusual: list[float] = []
        self._sum = 0.0

    def settle(self) -> None:
        """What has been seen since the change, if it lasts, is the usual from now on: tables have stayed."""
        known = self._unusual or list(self._usual)
        self.restart()
        self._usual.extend(known)

    def see(self, stages_W4: np.ndarray, step_ms: float) -> None:
        """A sampled step: ms of PLANNED_STAGES on each rank, and of the whole step."""
        gain = float(balance_gains(stages_W4, step_ms))
        if self.learns:
            self._usual.append(gain)
            return
        low, middle, high = np.quantile(self._usual, [0.25, 0.5, 0.75])
        above = (gain - middle) / max((high - low) / IQR_OF_NORMAL, self._least)
        # A step counts for what it lies above one standard deviation, and never for more than two more: one that
        # something else disturbed is not enough.
        self._sum = max(0.0, self._sum + min(above - 1.0, 2.0))
        if self._sum > 0.0:
            self._unusual.append(gain)
        else:
            self._usual.extend([*self._unusual, gain])
            self._unusual.clear()

    @property
    def learns(self) -> bool:
        """Whether too little is known of what is usual."""
        return len(self._usual) < thresholds.LEAST_SAMPLES

    @property
    def suspects(self) -> bool:
        return self._sum > 0.0

    @property
    def changed(self) -> bool:
        return self._sum >= thresholds.CHANGED

    @property
    def since(self) -> int:
        """Sampled steps since the change."""
        return len(self._unusual)

    @property
    def text(self) -> str:
        """'perfect balance would now save 31% of the step, where it was 4%'"""
        now, then = np.median(self._unusual), np.median(self._usual)
        return f"perfect balance would now save {now:.0%} of the step, where it was {max(then, 0.0):.0%}"
