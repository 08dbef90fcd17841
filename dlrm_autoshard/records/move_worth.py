"""Measures what a move saved: sampled steps under the old plan against sampled steps under the new one.

    worth = worth_of(before, after, predicted=(0.197, 0.028), scatter=0.02)     # worth.gain, .low, .high: 90%; .doubt

Throughput before and after also changes for other reasons, so only the planned stages of sampled steps are compared.
Pure arithmetic: no clock, no planner, no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from dlrm_autoshard.formats.json_file import made
from dlrm_autoshard.formats.words import count
from dlrm_autoshard.records.decisions import interval_in_words
from dlrm_autoshard.records.diagnosis import NINETY, NOTABLE_DRIFT, STARVED_BELOW, moved_part

LEAST_STEPS, MOST_STEPS = 3, 200
"""Steps compared under each plan: fewer have no quartiles; more add little, and are older."""
OTHER_WORK = 0.25
"""Log-ratio of total compute above which machine or data must have changed, not only the plan. Two ranks on cores that
share memory took 0.1 more when both were busy than one alone."""


@dataclass(frozen=True)
class TimedSteps:
    """Sampled steps under one plan while nothing else changed.

    cost_ms: each step's planned stages, by the slowest rank. step_ms: a whole sampled step. work_ms: compute of all
    ranks together in a typical step. cores: lowest CPU share of any rank in each step; () if unknown. lookups: values
    looked up per sample, by table.
    """

    cost_ms: tuple[float, ...]
    step_ms: float
    work_ms: float
    cores: tuple[float, ...] = ()
    lookups: tuple[float, ...] = ()

    def after(self, earlier: TimedSteps | None) -> TimedSteps:
        """Returns these steps together with earlier ones of the same plan, at most the last `MOST_STEPS`."""
        if earlier is None:
            return self
        new = min(1.0, len(self.cost_ms) / min(MOST_STEPS, len(self.cost_ms) + len(earlier.cost_ms)))
        known = self.cores and earlier.cores
        return TimedSteps(
            (earlier.cost_ms + self.cost_ms)[-MOST_STEPS:],
            new * self.step_ms + (1 - new) * earlier.step_ms,
            new * self.work_ms + (1 - new) * earlier.work_ms,
            (earlier.cores + self.cores)[-MOST_STEPS:] if known else (),
            self.lookups,
        )

    @property
    def undisturbed(self) -> TimedSteps:
        """The steps without CPU contention if there are enough of them, else all steps."""
        kept = [step for step, core in enumerate(self.cores) if core >= STARVED_BELOW]
        if len(kept) < LEAST_STEPS:
            return self
        cost_ms, cores = (tuple(values[step] for step in kept) for values in (self.cost_ms, self.cores))
        return replace(self, cost_ms=cost_ms, cores=cores)

    def alike(self, other: TimedSteps) -> bool:
        """Returns whether lookups by table and total compute are about the same in both."""
        same_data = moved_part(self.lookups, other.lookups) < NOTABLE_DRIFT
        return same_data and abs(math.log(max(self.work_ms, 1e-9) / max(other.work_ms, 1e-9))) < OTHER_WORK

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(record: Mapping[str, Any] | None) -> TimedSteps | None:
        if record is None:
            return None
        return made(TimedSteps, record)


@dataclass(frozen=True)
class Worth:
    """Gain of a move.

    gain: fraction of a step, negative if steps became slower; low, high: its 90% interval. incomparable: why the steps
    cannot be compared, or "". disagrees: how the gain contradicts its prediction, or "".
    """

    gain: float
    low: float
    high: float
    incomparable: str = ""
    disagrees: str = ""

    @property
    def doubt(self) -> str:
        return self.incomparable or self.disagrees

    def saved_ms(self, step_ms: float) -> float:
        """Returns ms saved per step, given the step's length under the new plan."""
        return step_ms * self.gain / (1 - self.gain)

    @property
    def uncertainty(self) -> float:
        """Standard deviation of the gain."""
        return (self.high - self.low) / 2 / NINETY


def worth_of(
    before: TimedSteps,
    after: TimedSteps,
    *,
    predicted: tuple[float, float],
    scatter: float = 0.0,
    instead: tuple[float, float] | None = None,
) -> Worth:
    """Estimates a move's gain.

    before, after: steps under the old and the new plan. predicted: gain expected by the decision, and its standard
    deviation. scatter: standard deviation of the gain between unchanged intervals, as a fraction of the step. instead:
    old plan's current cost / new plan's cost and its standard deviation, used when data or ranks have changed.
    """
    before, after = before.undisturbed, after.undisturbed
    after_ms = np.array(after.cost_ms)
    if instead is None:
        saved_ms, low_ms, high_ms = shift(np.array(before.cost_ms), after_ms)
    else:
        middle = float(np.median(after_ms))
        saved_ms, margin_ms = (instead[0] - 1) * middle, NINETY * instead[1] * middle
        low_ms, high_ms = saved_ms - margin_ms, saved_ms + margin_ms
    old_step_ms = max(after.step_ms + saved_ms, 1e-9)
    gain, margin = saved_ms / old_step_ms, NINETY * scatter
    low = gain - math.hypot((saved_ms - low_ms) / old_step_ms, margin)
    high = gain + math.hypot((high_ms - saved_ms) / old_step_ms, margin)
    foreseen, unsure = predicted[0], NINETY * predicted[1]
    disagrees = ""
    if foreseen - unsure > high or foreseen + unsure < low:
        measured = interval_in_words(gain, low, high)
        disagrees = f"measured {measured}, but predicted {foreseen:.1%}, give or take {unsure:.1%}"
    return Worth(gain, low, high, _incomparable(before, after), disagrees)


def _incomparable(before: TimedSteps, after: TimedSteps) -> str:
    counts = len(before.cost_ms), len(after.cost_ms)
    if min(counts) < LEAST_STEPS:
        return f"too few steps were sampled: {counts[0]} before the move and {counts[1]} after"
    share = min((fmean(steps.cores) for steps in (before, after) if steps.cores), default=1.0)
    if share < STARVED_BELOW:
        steps = count(sum(counts), "sampled step")
        return f"in the {steps} compared a rank got only {share:.0%} of its CPU core"
    return ""


def shift(before: np.ndarray, after: np.ndarray) -> tuple[float, float, float]:
    """Returns the Hodges-Lehmann estimate of before - after (the median of all pairwise differences) with its 90%
    interval by the rank-sum test. It is robust: a few disturbed steps do not matter.
    """
    pairs = np.sort(np.subtract.outer(before, after), axis=None)
    spread = math.sqrt(len(pairs) * (len(before) + len(after) + 1) / 12)  # of the rank sum
    cut = min(max(0, math.floor(len(pairs) / 2 - NINETY * spread)), (len(pairs) - 1) // 2)
    return float(np.median(pairs)), float(pairs[cut]), float(pairs[-1 - cut])
