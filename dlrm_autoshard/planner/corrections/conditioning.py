"""What is concluded from measurements: which ranks are slow, which moments were disturbed, how far each term varies.

likeliest = LikeliestSpreads()
likeliest.update(rows, values_N, noise_NN)                      # rows, values and noise: `Observed.rows`
posterior = posterior_of(rows, values_N, noise_NN, likeliest.spreads)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
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
Spread = Literal["table", "load", "fused", "together", "stages_alike", "rank", "slow_set", "noise"]
GRID: Mapping[Spread, tuple[float, ...]] = {
    "table": (0.05, 0.1, 0.2, 0.4),
    "load": (0.003, 0.01, 0.03, 0.1),
    "fused": (0.01, 0.03, 0.1, 0.2),
    "together": (0.003, 0.01, 0.03, 0.06),
    "stages_alike": (0.1, 0.4, 0.7, 0.9),
    "rank": (0.005, 0.01, 0.02, 0.04),
    "slow_set": (0.05, 0.1, 0.2, 0.4),
    "noise": (0.003, 0.01, 0.03, 0.06),
}
RELUCTANCE = 0.5
"""By how much likelier, as a power of e, a value that is half or twice the prior's must be to be taken. A job's own
measurements say little of how large `together` is: 0.12 hid half of a gain of 10%, so it is not among the values."""


def posterior_of(rows: Rows, values: np.ndarray, noise: np.ndarray, spreads: Spreads) -> Posterior:
    noise = noise + spreads.noise**2 * np.eye(len(values))
    keys = rows.rank_keys
    ranks = max(2, len(np.unique(rows.rank_N[rows.rank_N >= 0])))
    price = -float(np.log(SLOW / ranks))
    price_below = price - float(np.log(FAST))
    causes = {}
    for key in np.unique(keys[keys >= 0]):
        members = np.flatnonzero(keys == key)
        causes[int(key)] = Cause(members, spreads.slow_rank**2, price, price_below, rows.of_rank[members])
    for profile in np.unique(rows.profile_N[rows.profile_N >= 0]):
        members = np.flatnonzero((rows.profile_N == profile) & (rows.stage_N != CORE))
        causes[-2 - int(profile)] = Cause(members, MOMENT**2, -float(np.log(SLOW_MOMENT)))
    # A probe measures for a moment, in which something else may run; an interval's figures are of many.
    probed_N = rows.source_N == 0
    found = condition(rows.own.covariance(spreads, frozenset()) + noise, values, causes, probed_N)
    slow = frozenset(key for key in found.large if key >= 0)
    if not slow:
        return found
    # How slow those ranks are depends on what they have to do: once more, with that.
    rest = {key: cause for key, cause in causes.items() if key not in slow}
    posterior = condition(rows.own.covariance(spreads, slow) + noise, values, rest, probed_N)
    below = [key for key in slow if found.weights_N[causes[key].members].sum() < 0]
    prices = price * len(slow) + (price_below - price) * len(below)
    return replace(posterior, log_evidence=posterior.log_evidence - prices, large=posterior.large | slow)


class LikeliestSpreads:
    """Estimated anew once half of the profiles are new, or there are other shards: that takes most of the time that
    conditioning takes, and one profile more says little of how far things vary."""

    def __init__(self) -> None:
        self.spreads = Spreads()
        self._new_profiles, self._shard_rows = 0, -1  # since, and when, they were estimated

    def observed(self) -> None:
        """One profile more."""
        self._new_profiles += 1

    def update(self, rows: Rows, values: np.ndarray, noise: np.ndarray) -> None:
        profiles, shard_rows = len(set(rows.profile_N) - {-1}), int((rows.profile_N < 0).sum())
        if shard_rows != self._shard_rows or 2 * self._new_profiles >= max(1, profiles):
            self.spreads, self._new_profiles, self._shard_rows = likeliest_spreads(rows, values, noise), 0, shard_rows

    def to_json(self) -> dict[str, Any]:
        likeliest = {name: getattr(self.spreads, name) for name in GRID}
        return {"likeliest": likeliest, "new_profiles": self._new_profiles, "shard_rows": self._shard_rows}

    def load_json(self, record: Mapping[str, Any]) -> None:
        self.spreads = Spreads(**record["likeliest"])
        self._new_profiles, self._shard_rows = record["new_profiles"], record["shard_rows"]


def likeliest_spreads(rows: Rows, values: np.ndarray, noise: np.ndarray) -> Spreads:
    """One after the other, with `RELUCTANCE`."""
    best = prior = Spreads()

    @cache
    def judged(spreads: Spreads) -> tuple[float, bool]:
        """How fit, and whether some rank is slow."""
        found = posterior_of(rows, values, noise, spreads)
        away = sum(np.log2(getattr(spreads, name) / getattr(prior, name)) ** 2 for name in GRID)
        return found.log_evidence - RELUCTANCE * float(away), any(key >= 0 for key in found.large)

    for name, values_of in GRID.items():
        if name == "slow_set" and not judged(best)[1]:
            continue  # it is a term of slow ranks alone
        trials = [replace(best, **{name: value}) for value in values_of]
        best = max(trials, key=lambda spreads: judged(spreads)[0])
    return best
