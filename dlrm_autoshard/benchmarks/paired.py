"""Interleaves contenders, and gives figures of some rounds 95% bootstrap intervals.

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
    """A figure, such as a median of ratios, with its 95% interval."""

    median: float
    low: float
    high: float

    def map(self, function: Callable[[float], float]) -> Ratio:
        """Applies an increasing function to the figure and to the ends of its interval."""
        return Ratio(function(self.median), function(self.low), function(self.high))


def in_words(value: float, interval: Sequence[float], digits: str) -> str:
    """Writes an interval: '1.22 to 1.34', '1.22 or more', 'few samples' without ends, '' for a point."""
    low, high = interval[0], interval[-1]
    if low == high:
        return ""
    if math.isinf(low) and math.isinf(high):
        return "few samples"
    if math.isinf(high):
        return "so far" if low == value else f"{low:{digits}} or more"
    return f"{high:{digits}} or less" if math.isinf(low) else f"{low:{digits}} to {high:{digits}}"


def alternate(*contenders: Callable[[], float | None], rounds: int, warmup: int = 1) -> tuple[list[float], ...]:
    """Runs the contenders in turn, A B A B ..., and returns each one's seconds by round.

    A slow stretch of the machine thus hits all of them alike. A contender that returns a float has timed itself.
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
    """Returns the median over rounds of numerator / denominator, with its interval."""
    if len(numerator) != len(denominator) or not len(numerator):
        raise ValueError(f"paired timing needs as many rounds of each; got {len(numerator)} and {len(denominator)}.")
    return median_with_interval([a / b for a, b in zip(numerator, denominator, strict=True)])


def median_with_interval(values: Sequence[float]) -> Ratio:
    """Returns the median with its 95% bootstrap interval."""
    return with_interval(lambda rows: np.median(rows, axis=-1), values)


FEWEST = 5
"""Fewer samples than this give no interval."""
Samples: TypeAlias = Sequence[float] | np.ndarray


def mean_with_interval(values: Samples) -> Ratio:
    """Returns the mean with its 95% bootstrap interval."""
    return with_interval(lambda rows: rows.mean(axis=-1), values)


def ratio_of_means(numerator: Samples, denominator: Samples) -> Ratio:
    """Returns mean(numerator) / mean(denominator) over paired samples, with its interval."""
    return with_interval(lambda a, b: a.mean(axis=-1) / b.mean(axis=-1), numerator, denominator)


def with_interval(statistic: Callable[..., Any], *samples: Samples) -> Ratio:
    """Returns a statistic with its 95% bootstrap interval. statistic: reduces arrays along their last axis.

    Each draw takes the same rounds of every sample, so that paired measurements stay paired. Fewer than five rounds get
    an infinite interval: the range of two holds the median half of the time, that of four 87%.
    """
    rows = np.asarray(samples, dtype=np.float64)
    found, count = float(statistic(*rows)), rows.shape[1]
    if count < FEWEST:
        return Ratio(found, -np.inf, np.inf)
    draws = np.random.default_rng(0).integers(0, count, size=(2000, count))
    outside = _outside(count)
    low, high = np.quantile(statistic(*rows[:, draws]), [outside, 1 - outside], method="closest_observation")
    return Ratio(found, float(low), float(high))


def proportion(count: int, of: int) -> Ratio:
    """Returns count / of with its 95% interval (Wilson 1927). Zero of 12 does not mean zero of 50."""
    z = NormalDist().inv_cdf(0.975)
    middle = (count + z * z / 2) / (of + z * z)
    reach = z / (of + z * z) * (count * (of - count) / of + z * z / 4) ** 0.5
    return Ratio(count / of, max(0.0, middle - reach), min(1.0, middle + reach))


def _outside(count: int) -> float:
    """Returns the share of draws outside a 95% interval on each side: less than 2.5%, because draws from few samples
    differ too little ("expanded percentile": Hesterberg 2015, The American Statistician 69)."""
    normal, degrees = NormalDist(), count - 1
    z = normal.inv_cdf(0.975)
    # Student's t, to the second order in 1 / degrees.
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return normal.cdf(-t * (count / degrees) ** 0.5)
