"""Compares what the same steps cost under the plan that a move left and under the one that it made.

    worth = worth_of(before, after, predicted=(0.197, 0.028), scatter=0.02)     # worth.gain, .low, .high: 90%; .doubt

A job may become slower or faster by itself, so throughput before and after is no measure: what counts are the stages
that placement decides, in sampled steps. Pure arithmetic: no clock, no planner, no ranks.
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
"""Steps under either plan that are compared: fewer have no quartiles; more tell no more, and are of longer ago."""
OTHER_WORK = 0.25
"""By so much (a logarithm) two plans' computing, all ranks together, differs only where the machine or the data are not
the same: with both of two ranks at work it was 0.1 more than with one of them, on cores that share their memory."""


@dataclass(frozen=True)
class TimedSteps:
    """Sampled steps under one plan while nothing else changed.

    cost_ms: what each spent in the stages that placement decides, the slowest rank's. step_ms: the whole of
    such a step. work_ms: what all ranks together computed in a typical step. cores: of each of cost_ms the
    part of the time for which the rank that had its core least had it; () where that is not known. lookups: values
    looked up for a sample, by table.
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
        """Those steps in which every rank had its core, where there are enough of them to compare; else all."""
        kept = [step for step, core in enumerate(self.cores) if core >= STARVED_BELOW]
        if len(kept) < LEAST_STEPS:
            return self
        cost_ms, cores = (tuple(values[step] for step in kept) for values in (self.cost_ms, self.cores))
        return replace(self, cost_ms=cost_ms, cores=cores)

    def alike(self, other: TimedSteps) -> bool:
        """Whether both looked up about as much in each table, and ranks took about as long for it in all."""
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
    """gain: part of a step saved, negative where steps became slower; low, high: its 90% interval. incomparable: why
    the steps before and after do not tell; disagrees: how far it is from what was predicted. Both "" where all is well.
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
        """Returns what a step saves that takes so long under the new plan."""
        return step_ms * self.gain / (1 - self.gain)

    @property
    def uncertainty(self) -> float:
        """Standard deviation."""
        return (self.high - self.low) / 2 / NINETY


def worth_of(
    before: TimedSteps,
    after: TimedSteps,
    *,
    predicted: tuple[float, float],
    scatter: float = 0.0,
    instead: tuple[float, float] | None = None,
) -> Worth:
    """before, after: steps under the plan that was left, and under the new one. predicted: the gain that the move was
    made for, and its standard deviation. scatter: standard deviation of a gain between intervals in which nothing
    changes, a part of the step. instead: what the old plan costs now as a multiple of what the new one does, and the
    standard deviation of that, where the data or the ranks are not as they were before.
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
        told = interval_in_words(gain, low, high)
        disagrees = f"its steps say {told}, which is not what was predicted, give or take {unsure:.1%}"
    return Worth(gain, low, high, _incomparable(before, after), disagrees)


def _incomparable(before: TimedSteps, after: TimedSteps) -> str:
    counts = len(before.cost_ms), len(after.cost_ms)
    if min(counts) < LEAST_STEPS:
        return f"too few steps were sampled to tell: {counts[0]} before it and {counts[1]} after"
    share = min((fmean(steps.cores) for steps in (before, after) if steps.cores), default=1.0)
    if share < STARVED_BELOW:
        steps = count(sum(counts), "sampled step")
        return f"in the {steps} compared a rank had its core for {share:.0%} of the time"
    return ""


def shift(before: np.ndarray, after: np.ndarray) -> tuple[float, float, float]:
    """Returns by how much values before lie above those after, and a 90% interval of that: the median of all pairs'
    differences (Hodges and Lehmann), and those of their order that the rank sum test allows. No distribution is
    assumed, so a few disturbed steps do no harm.
    """
    pairs = np.sort(np.subtract.outer(before, after), axis=None)
    spread = math.sqrt(len(pairs) * (len(before) + len(after) + 1) / 12)  # of the rank sum
    cut = min(max(0, math.floor(len(pairs) / 2 - NINETY * spread)), (len(pairs) - 1) // 2)
    return float(np.median(pairs)), float(pairs[cut]), float(pairs[-1 - cut])
