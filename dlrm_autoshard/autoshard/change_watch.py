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
from dlrm_autoshard.costs import IQR_OF_NORMAL


class ChangeWatch:
    """A cumulative sum (CUSUM; Page 1954, Biometrika 41) of how far ranks are from where they usually are beside one
    another, in parts of the step: of each step by itself, so that a machine that is slower as a whole changes nothing.
    Where ranks are usually even, that is what perfect balance would save; where a slow rank has been given less to do
    and is slow no more, the others are the slow ones now, by as much, and balance alone would say nothing of it."""

    def __init__(self, min_gain: float) -> None:
        """min_gain: part of a step; smaller changes are none."""
        self._least = max(min_gain, thresholds.USUAL_SCATTER)
        self.restart()

    def restart(self) -> None:
        """What comes now is the usual, whatever was before: tables have moved."""
        self._usual: deque[np.ndarray] = deque(maxlen=4 * thresholds.SAMPLES_OF_CHANGE)  # of `see`, beside_W4
        self._unusual: list[np.ndarray] = []
        self._sum = 0.0

    def settle(self) -> None:
        """What has been seen since the change, if it lasts, is the usual from now on: tables have stayed."""
        known = self._unusual or list(self._usual)
        self.restart()
        self._usual.extend(known)

    def see(self, stages_W4: np.ndarray, step_ms: float) -> None:
        """A sampled step: ms of PLANNED_STAGES on each rank, and of the whole step."""
        beside_W4 = (stages_W4 - stages_W4.mean(axis=0)) / step_ms
        if self.learns:
            self._usual.append(beside_W4)
            return
        usual = list(self._usual)
        among = [_apart(one, [*usual[:number], *usual[number + 1 :]]) for number, one in enumerate(usual)]
        low, middle, high = np.quantile(among, [0.25, 0.5, 0.75])
        above = (_apart(beside_W4, usual) - middle) / max((high - low) / IQR_OF_NORMAL, self._least)
        # A step counts for what it lies above one standard deviation, and never for more than two more: one that
        # something else disturbed is not enough.
        self._sum = max(0.0, self._sum + min(above - 1.0, 2.0))
        if self._sum > 0.0:
            self._unusual.append(beside_W4)
        else:
            self._usual.extend([*self._unusual, beside_W4])
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
        """'beside the other ranks rank 1 now takes 31% of the step more than it did'"""
        changed_W = (np.median(self._unusual, axis=0) - np.median(list(self._usual), axis=0)).sum(axis=1)
        rank = int(np.abs(changed_W).argmax())
        more = "more" if changed_W[rank] > 0 else "less"
        return f"beside the other ranks rank {rank} now takes {abs(changed_W[rank]):.0%} of the step {more} than it did"


def _apart(beside_W4: np.ndarray, usual: Sequence[np.ndarray]) -> float:
    """Part of a step: of each stage, how far the rank is that is farthest from where it usually is."""
    return float(np.abs(beside_W4 - np.median(usual, axis=0)).max(axis=0).sum())
