"""Conclusions from measurements: which ranks are slow, which moments were disturbed, how far each term varies.

evidence = observed.evidence().in_eras(eras)                     # `observed.py`
likeliest = LikeliestSpreads()
likeliest.update(evidence)
posterior = evidence.posterior(likeliest.spreads)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np

from dlrm_autoshard.planner.corrections.gaussian import Cause, Posterior, condition
from dlrm_autoshard.planner.corrections.terms import CORE, Rows, Spreads

SLOW = 0.1
"""Slow ranks that are expected among all of a job, in each era."""
FAST = 0.05
"""Fast ones, to a slow one: what else a rank's core does takes time."""
MOMENT, SLOW_MOMENT = 0.3, 0.02
"""Standard deviation of what a whole interval took longer, of those (one in fifty) in which the machine was another."""
Spread = Literal["table", "load", "fused", "together", "stages_alike", "rank", "rank_moment", "slow_set", "noise"]
GRID: Mapping[Spread, tuple[float, ...]] = {
    "table": (0.05, 0.1, 0.2, 0.4),
    "load": (0.003, 0.01, 0.03, 0.1),
    "fused": (0.01, 0.03, 0.1, 0.2),
    "together": (0.003, 0.01, 0.03, 0.06),
    "stages_alike": (0.1, 0.4, 0.7, 0.9),
    "rank": (0.005, 0.01, 0.02, 0.04),
    "rank_moment": (0.007, 0.015, 0.03, 0.06),
    "slow_set": (0.05, 0.1, 0.2, 0.4),
    "noise": (0.003, 0.01, 0.03, 0.06),
}
RELUCTANCE = 0.5
"""By how much likelier, as a power of e, a value that is half or twice the prior's must be to be taken. A job's own
measurements say little of how large `together` is: 0.12 hid half of a gain of 10%, so it is not among the values."""


@dataclass(frozen=True)
class Evidence:
    """Measurements as rows, with their logarithms beside what was predicted, and the covariance of their noise."""

    rows: Rows
    values_N: np.ndarray
    noise_NN: np.ndarray
    _last: dict[Spreads, Posterior] = field(default_factory=dict, init=False, repr=False)

    def in_eras(self, eras: Sequence[int]) -> Evidence:
        """eras: one a profile."""
        return replace(self, rows=self.rows.in_eras(eras))

    def posterior(self, spreads: Spreads) -> Posterior:
        """The last one is kept: a matrix of all rows by all rows."""
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
        of_ranks, of_moments = self._members
        causes = {
            key: Cause(members, spreads.slow_rank**2, price, price_below, rows.of_rank[members])
            for key, members in of_ranks.items()
        }
        for key, members in of_moments.items():
            causes[key] = Cause(members, MOMENT**2, -float(np.log(SLOW_MOMENT)))
        # A probe measures for a moment, in which something else may run; an interval's figures are of many.
        found = condition(rows.own.covariance(spreads, frozenset()) + noise, values, causes, rows.probed)
        slow = frozenset(key for key in found.large if key >= 0)
        if not slow:
            return found
        # How slow those ranks are depends on what they have to do: once more, with that.
        rest = {key: cause for key, cause in causes.items() if key not in slow}
        posterior = condition(rows.own.covariance(spreads, slow) + noise, values, rest, rows.probed)
        below = [key for key in slow if found.weights_N[causes[key].members].sum() < 0]
        prices = price * len(slow) + (price_below - price) * len(below)
        return replace(posterior, log_evidence=posterior.log_evidence - prices, large=posterior.large | slow)

    @cached_property
    def _members(self) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """Rows of each rank in each era by its key, and of each profile, by keys below -1."""
        keys_N, profile_N = self.rows.rank_keys, self.rows.profile_N
        of_ranks = {int(key): np.flatnonzero(keys_N == key) for key in np.unique(keys_N[keys_N >= 0])}
        at_once_N = np.where(self.rows.stage_N != CORE, profile_N, -1)
        profiles = np.unique(profile_N[profile_N >= 0])
        return of_ranks, {-2 - int(profile): np.flatnonzero(at_once_N == profile) for profile in profiles}


class LikeliestSpreads:
    """Estimated anew once half of the profiles are new, or there are other shards: that takes most of the time that
    conditioning takes, and one profile more says little of how far things vary."""

    def __init__(self) -> None:
        self.spreads = Spreads()
        self._new_profiles, self._shard_rows = 0, -1  # since, and when, they were estimated

    def observed(self) -> None:
        """One profile more."""
        self._new_profiles += 1

    def update(self, evidence: Evidence) -> None:
        profile_N = evidence.rows.profile_N
        profiles, shard_rows = len(set(profile_N.tolist()) - {-1}), int((profile_N < 0).sum())
        if shard_rows != self._shard_rows or 2 * self._new_profiles >= max(1, profiles):
            self.spreads, self._new_profiles, self._shard_rows = likeliest_spreads(evidence), 0, shard_rows

    def to_json(self) -> dict[str, Any]:
        likeliest = {name: getattr(self.spreads, name) for name in GRID}
        return {"likeliest": likeliest, "new_profiles": self._new_profiles, "shard_rows": self._shard_rows}

    def load_json(self, record: Mapping[str, Any]) -> None:
        self.spreads = Spreads(**record["likeliest"])
        self._new_profiles, self._shard_rows = record["new_profiles"], record["shard_rows"]


def likeliest_spreads(evidence: Evidence) -> Spreads:
    """One after the other, with `RELUCTANCE`."""
    best = prior = Spreads()

    @cache
    def judged(spreads: Spreads) -> tuple[float, bool]:
        """How fit, and whether some rank is slow."""
        found = evidence.posterior(spreads)
        away = sum(np.log2(getattr(spreads, name) / getattr(prior, name)) ** 2 for name in GRID)
        return found.log_evidence - RELUCTANCE * float(away), any(key >= 0 for key in found.large)

    for name, values_of in GRID.items():
        if name == "slow_set" and not judged(best)[1]:
            continue  # it is a term of slow ranks alone
        trials = [replace(best, **{name: value}) for value in values_of]
        best = max(trials, key=lambda spreads: judged(spreads)[0])
    return best
