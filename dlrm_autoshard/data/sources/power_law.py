"""Draws rows by a bounded power law: the i-th hottest of n rows has probability ~ i^-alpha.

hot = PowerLaw.scattered(num_rows=1_000_000, alpha=1.05, key=key_of("hot rows"))
hot.rows(np.array([0.0, 0.5, 0.999]))     # maps uniform draws to rows
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_autoshard.data.hashing import mix64


@dataclass(frozen=True)
class PowerLaw:
    """The i-th hottest id (from 0) is row (i * multiplier + offset) mod num_rows: a bijection, as the two are coprime.

    Rows are computed in float64, which is vectorized where 64-bit integer division is not; the multiplier is small
    enough for i * multiplier + offset to be exact.

    The i-th probability is the area under x^-alpha from i - 1/2 to i + 1/2, whose inverse has a closed form, so no
    table of n probabilities is needed. That is off by 10% at i = 1, so the area starts where the first is exact; it
    remains 2.3% too large at i = 2 and 1% at i = 3 (alpha 1.05).
    """

    num_rows: int
    alpha: float
    multiplier: int
    offset: int

    @staticmethod
    def scattered(num_rows: int, alpha: float, key: np.uint64) -> PowerLaw:
        first, second = (int(draw) / 2**64 for draw in mix64(np.array([key, key + np.uint64(1)], np.uint64)))
        multiplier = max(1, int((0.3 + 0.4 * first) * min(num_rows, 2**51 // num_rows)))
        while math.gcd(multiplier, num_rows) != 1:
            multiplier += 1
        return PowerLaw(num_rows, alpha, multiplier, int(second * num_rows))

    def rows(self, draws_N: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns a row for each uniform draw in [0, 1), as whole float64 numbers; overwrites `draws_N`."""
        # x^-alpha integrates to x^power / power, except for alpha = 1, which is moved a little.
        power = 1.0 - (self.alpha if abs(self.alpha - 1.0) > 1e-4 else 1.0001)
        first = 1.5**power - power  # the area from here to 1.5 is 1
        last = (self.num_rows + 0.5) ** power
        heat_N = draws_N
        heat_N *= last - first
        heat_N += first
        np.power(heat_N, 1.0 / power, out=heat_N)
        heat_N -= 0.5
        np.floor(heat_N, out=heat_N)
        np.clip(heat_N, 0, self.num_rows - 1, out=heat_N)  # rounding errors at both ends
        heat_N *= self.multiplier
        heat_N += self.offset
        wraps_N = heat_N / self.num_rows
        np.floor(wraps_N, out=wraps_N)
        wraps_N *= self.num_rows
        heat_N -= wraps_N
        return heat_N
