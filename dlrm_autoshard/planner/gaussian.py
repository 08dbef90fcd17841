"""Gaussian conditioning on correlated observations, with a few of their causes perhaps far larger than the others.

posterior = condition(covariance_NN, values_N, causes, large)
posterior.mean(cross_MN), posterior.covariance(own_MM, cross_MN), posterior.log_evidence
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

MOST_LARGE = 8
"""Causes that may be large at a time: after so many it is no longer they that are unusual."""


@dataclass(frozen=True)
class Posterior:
    inverse_NN: np.ndarray
    weights_N: np.ndarray
    log_evidence: float
    large: frozenset[int]

    def mean(self, cross_MN: np.ndarray) -> np.ndarray:
        mean: np.ndarray = cross_MN @ self.weights_N
        return mean

    def covariance(self, own_MM: np.ndarray, cross_MN: np.ndarray) -> np.ndarray:
        rest: np.ndarray = own_MM - cross_MN @ self.inverse_NN @ cross_MN.T
        return rest


def condition(
    covariance_NN: np.ndarray,
    values_N: np.ndarray,
    causes: Mapping[int, np.ndarray] | None = None,
    variance: float = 0.0,
    least_gain: float = 3.0,
    least_gain_below: float | None = None,
) -> Posterior:
    """Zero-mean normal values with that covariance. causes: groups of observations (indices by key), each with
    something in common that is 0, or has `variance` where that makes the observations likelier by e^least_gain
    (least_gain_below: where it is negative; by default as much)."""
    inverse = np.linalg.inv(covariance_NN)
    inverse = (inverse + inverse.T) / 2
    log_determinant = float(np.linalg.slogdet(covariance_NN)[1])
    left = dict(causes or {})
    large: set[int] = set()
    bonus = 0.0
    while left and len(large) < MOST_LARGE:
        weights = inverse @ values_N
        gains = {}
        for key, members in left.items():
            own = float(inverse[np.ix_(members, members)].sum())
            pull = float(weights[members].sum())
            price = least_gain if pull > 0 or least_gain_below is None else least_gain_below
            gain = 0.5 * variance * pull**2 / (1 + variance * own) - 0.5 * np.log1p(variance * own) - price
            gains[key] = (gain, own, price)
        key = max(gains, key=lambda k: gains[k][0])
        gain, own, price = gains[key]
        if gain <= 0:
            break
        row = inverse[left.pop(key)].sum(axis=0)
        inverse = inverse - np.outer(row, row) * (variance / (1 + variance * own))
        log_determinant += float(np.log1p(variance * own))
        bonus -= price
        large.add(key)
    weights = inverse @ values_N
    evidence = -0.5 * (float(values_N @ weights) + log_determinant) + bonus
    return Posterior(inverse, weights, evidence, frozenset(large))
