"""Conclusions from measurements: which ranks are slow, how far each term varies.

evidence = observed.evidence().in_eras(eras)                     # `observed.py`
posterior = evidence.posterior(likeliest_spreads(evidence, Spreads()))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import numpy as np

from dlrm_autoshard.planner.corrections.gaussian import Cause, Posterior, condition
from dlrm_autoshard.planner.corrections.terms import Rows, Spreads

SLOW = 0.05
"""Slow ranks that are expected among all of a job, in each era."""
FAST = 0.05
"""Fast ones, to a slow one: what else a rank's core does takes time."""
Spread = Literal["table", "load", "fused", "together", "stages_alike", "rank", "rank_moment", "noise"]
GRID: Mapping[Spread, tuple[float, ...]] = {
    "table": (0.05, 0.1, 0.2, 0.4),
    "load": (0.003, 0.01, 0.03, 0.1),
    "fused": (0.01, 0.03, 0.1, 0.2),
    "together": (0.003, 0.01, 0.03, 0.06),
    "stages_alike": (0.1, 0.4, 0.7, 0.9),
    "rank": (0.005, 0.01, 0.02, 0.04),
    "rank_moment": (0.007, 0.015, 0.03, 0.06),
    "noise": (0.003, 0.01, 0.03, 0.06),
}
RELUCTANCE = 0.5
"""By how much likelier, as a power of e, a value that is half or twice the prior's must be to be taken. A job's own
measurements say little of how large `together` is: 0.12 hid half of a gain of 10%, so it is not among the values."""


@dataclass(frozen=True)
class Evidence:
    """Measurements as rows: logarithms relative to predictions, and the covariance of their noise."""

    rows: Rows
    values_N: np.ndarray
    noise_NN: np.ndarray
    _last: dict[Spreads, Posterior] = field(default_factory=dict, init=False, repr=False)

    def in_eras(self, eras: Sequence[int]) -> Evidence:
        """Returns the evidence with profiles assigned to eras. eras: one per profile."""
        return replace(self, rows=self.rows.in_eras(eras))

    def posterior(self, spreads: Spreads) -> Posterior:
        """Returns the posterior. Only the last is cached, as it holds a matrix of all rows by all rows."""
        if spreads not in self._last:
            self._last.clear()
            self._last[spreads] = self._concluded(spreads)
        return self._last[spreads]

    def _concluded(self, spreads: Spreads) -> Posterior:
        rows, values = self.rows, self.values_N
        noise = self.noise_NN + spreads.noise**2 * np.eye(len(values))
        ranks = max(2, len(np.unique(rows.rank_N[rows.rank_N >= 0])))
        price = -float(np.log(SLOW / ranks))
        price_below = price - float(np.log(FAST))
        keys_N = rows.rank_keys
        causes = {}
        for key in np.unique(keys_N[keys_N >= 0]).tolist():
            members = np.flatnonzero(keys_N == key)
            causes[key] = Cause(members, spreads.slow_rank**2, price, price_below, rows.of_rank[members])
        # A probe measures for a moment, in which something else may run; an interval's figures are of many.
        return condition(rows.own.covariance(spreads, frozenset()) + noise, values, causes, rows.probed)


def likeliest_spreads(evidence: Evidence, prior: Spreads) -> Spreads:
    """Returns the likeliest spreads, chosen one after the other, with `RELUCTANCE`; those that are 0 stay it."""
    best, names = prior, [name for name in GRID if getattr(prior, name) > 0]

    @cache
    def fit(spreads: Spreads) -> float:
        away = sum(np.log2(getattr(spreads, name) / getattr(prior, name)) ** 2 for name in names)
        return evidence.posterior(spreads).log_evidence - RELUCTANCE * float(away)

    for name in names:
        best = max((replace(best, **{name: value}) for value in GRID[name]), key=fit)
    return best
