"""Paired timing, and how sure a figure of some rounds is: contenders in turns, 95% bootstrap intervals.

ratio = paired_ratio(*alternate(ours, theirs, rounds=9))           # A B A B on the same machine
ratio.median, ratio.low, ratio.high
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """A median of ratios, say, with its 95% bootstrap interval."""

    median: float
    low: float
    high: float

    def map(self, function: Callable[[float], float]) -> Ratio:
        """function: one that rises."""
        return Ratio(function(self.median), function(self.low), function(self.high))


def in_words(value: float, interval: Sequence[float], digits: str) -> str:
    """An interval as far as it has ends: '1.22 to 1.34', '1.22 or more', 'of few'; '' where it is a point."""
    low, high = interval[0], interval[-1]
    if low == high:
        return ""
    if math.isinf(low) and math.isinf(high):
        return "of few"
    if math.isinf(high):
        return "so far" if low == value else f"{low:{digits}} or more"
    return f"{high:{digits}} or less" if math.isinf(low) else f"{low:{digits}} to {high:{digits}}"


def alternate(*contenders: Callable[[], float | None], rounds: int, warmup: int = 1) -> tuple[list[float], ...]:
    """Runs the contenders in turn, A B A B ..., so that a slow stretch of the machine falls on all of them alike.

    Returns each contender's seconds by round. A contender that returns a float has timed itself; None is timed here.
    """
    seconds: tuple[list[float], ...] = tuple([] for _ in contenders)
    for number in range(warmup + rounds):
        for contender, row in zip(contenders, seconds, strict=True):
            started = time.perf_counter()
            own = contender()
            elapsed = time.perf_counter() - started if own is None else own
            if number >= warmup:
                row.append(elapsed)
    return seconds


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Median over rounds of numerator / denominator: at 1.3 the denominator takes 1/1.3 of the numerator's time."""
    if len(numerator) != len(denominator) or not len(numerator):
        raise ValueError(f"paired timing needs as many rounds of each; got {len(numerator)} and {len(denominator)}.")
    return median_with_interval([a / b for a, b in zip(numerator, denominator, strict=True)])


def median_with_interval(values: Sequence[float]) -> Ratio:
    return with_interval(lambda rows: np.median(rows, axis=-1), values)


FEWEST = 5
"""Samples that an interval is told of."""
Samples: TypeAlias = Sequence[float] | np.ndarray


def ratio_of_means(numerator: Samples, denominator: Samples) -> Ratio:
    return with_interval(lambda a, b: a.mean(axis=-1) / b.mean(axis=-1), numerator, denominator)


def with_interval(statistic: Callable[..., Any], *samples: Samples) -> Ratio:
    """A statistic of samples, with 95% of what it is of other draws: the same rounds of each sample, so that what was
    measured side by side stays so. Fewer than five tell too little of others: their interval has no ends (from the
    least to the most of two holds the median half of the time, of four 87%). statistic: of arrays, along their last
    axis."""
    rows = np.asarray(samples, dtype=np.float64)
    found, count = float(statistic(*rows)), rows.shape[1]
    if count < FEWEST:
        return Ratio(found, -np.inf, np.inf)
    draws = np.random.default_rng(0).integers(0, count, size=(2000, count))
    outside = _outside(count)
    low, high = np.quantile(statistic(*rows[:, draws]), [outside, 1 - outside], method="closest_observation")
    return Ratio(found, float(low), float(high))


def proportion(count: int, of: int) -> Ratio:
    """With 95% of what it may be of all (Wilson 1927): none of 12 does not say that there is none in 50."""
    z = NormalDist().inv_cdf(0.975)
    middle = (count + z * z / 2) / (of + z * z)
    reach = z / (of + z * z) * (count * (of - count) / of + z * z / 4) ** 0.5
    return Ratio(count / of, max(0.0, middle - reach), min(1.0, middle + reach))


def _outside(count: int) -> float:
    """Part of the draws of so many samples on either side of a 95% interval: less than 2.5%, for draws of a few differ
    by less than these do from others (Hesterberg 2015, The American Statistician 69, "expanded percentile")."""
    normal, degrees = NormalDist(), count - 1
    z = normal.inv_cdf(0.975)
    # Student's t, to the second order in 1 / degrees.
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return normal.cdf(-t * (count / degrees) ** 0.5)
