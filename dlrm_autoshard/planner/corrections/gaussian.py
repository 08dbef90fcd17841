"""Gaussian conditioning on correlated observations, with a few of their causes perhaps far larger than the others.

posterior = condition(covariance_NN, values_N, {7: Cause(members, 0.5, 3.0)}, may_be_disturbed_N)
posterior.mean(cross_MN), posterior.covariance(own_MM, cross_MN), posterior.log_evidence
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

LEAST = 1e-9
"""Variance, of logarithms, that does not matter: 0.003%."""
DISTURBED, DISTURBED_PRICE = 0.3**2, 3.9
"""Variance of an observation that something else disturbed, beside its own; one is taken for such where that makes all
observations likelier by more than e^3.9 (one in fifty)."""
MOST_LARGE = 8
"""Causes that may be large at a time, and observations disturbed: after so many it is no longer they that are
unusual."""


@dataclass(frozen=True)
class Cause:
    """A cause that some observations (`members`, indices) share: 0, or of `variance` if that makes all observations
    likelier by more than e^price (price_below: if the cause is negative). parts: each member's share of it."""

    members: np.ndarray
    variance: float
    price: float
    price_below: float | None = None
    parts: np.ndarray | float = 1.0


@dataclass(frozen=True)
class Posterior:
    """The inverse of the observations' covariance, its product with their values, and the causes that are large."""

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
    causes: Mapping[int, Cause] | None = None,
    may_be_disturbed_N: np.ndarray | None = None,
) -> Posterior:
    """Returns the posterior of zero-mean normal values with that covariance. causes: by key; the posterior says
    which are `large`. may_be_disturbed_N: observations that something else may have disturbed."""
    lower_NN = np.linalg.cholesky(covariance_NN)
    # Half the time that numpy takes to invert a matrix of which it does not know that it is symmetric.
    inverse = torch.cholesky_inverse(torch.from_numpy(lower_NN)).numpy()
    log_determinant = 2 * float(np.log(lower_NN.diagonal()).sum())
    prices = 0.0

    keys, every = list(causes or {}), list((causes or {}).values())
    inside_KN = np.zeros((len(every), len(values_N)))
    for inside_N, cause in zip(inside_KN, every, strict=True):
        inside_N[cause.members] = cause.parts
    own_K = ((inside_KN @ inverse) * inside_KN).sum(axis=1)

    def widen(row: np.ndarray, own: float, variance: float, price: float) -> None:
        """Adds `variance` that some observations share. row, own: the sum of their rows of the inverse, weighted by
        their shares, and of their own entries in it."""
        nonlocal inverse, own_K, log_determinant, prices
        factor = variance / (1 + variance * own)
        inverse = inverse - np.outer(row, row) * factor
        own_K = own_K - factor * (inside_KN @ row) ** 2
        log_determinant += float(np.log1p(variance * own))
        prices += price

    variance_K = np.array([cause.variance for cause in every])
    price_K = np.array([cause.price for cause in every])
    below_K = np.array([cause.price if cause.price_below is None else cause.price_below for cause in every])
    may_be_N = np.zeros(len(values_N), dtype=bool) if may_be_disturbed_N is None else may_be_disturbed_N.copy()
    large, disturbed = set[int](), 0
    while True:  # each time what makes the observations likelier by most: one that was disturbed, or a cause of several
        pull_N, own_N = inverse @ values_N, inverse.diagonal()
        gain_N = np.where(may_be_N, _gain(pull_N, own_N, DISTURBED) - DISTURBED_PRICE, -np.inf)
        pull_K = inside_KN @ pull_N
        asked_K = np.where(pull_K > 0, price_K, below_K)
        gain_K = _gain(pull_K, own_K, variance_K) - asked_K
        gain_K[[key in large for key in keys]] = -np.inf
        one = float(gain_N.max(initial=-np.inf)) if disturbed < MOST_LARGE else -np.inf
        several = float(gain_K.max(initial=-np.inf)) if len(large) < MOST_LARGE else -np.inf
        if max(one, several) <= 0:
            break
        if several >= one:
            most = int(gain_K.argmax())
            widen(inside_KN[most] @ inverse, float(own_K[most]), every[most].variance, float(asked_K[most]))
            large.add(keys[most])
        else:
            worst = int(gain_N.argmax())
            widen(inverse[worst], float(own_N[worst]), DISTURBED, DISTURBED_PRICE)
            may_be_N[worst], disturbed = False, disturbed + 1
    weights = inverse @ values_N
    evidence = -0.5 * (float(values_N @ weights) + log_determinant) - prices
    return Posterior(inverse, weights, evidence, frozenset(large))


def _gain(pull: Any, own: Any, variance: float | np.ndarray) -> Any:
    """Returns the gain in log evidence if observations share `variance` more. pull: their summed weights. Takes
    numbers or arrays."""
    return 0.5 * variance * pull**2 / (1 + variance * own) - 0.5 * np.log1p(variance * own)


def square_root(covariance_NN: np.ndarray) -> np.ndarray:
    """Returns [N, N] whose product with its transpose is the covariance up to `LEAST`; logarithms may depend on one
    another."""
    if not covariance_NN.any():
        return covariance_NN
    try:
        return np.linalg.cholesky(covariance_NN + LEAST * np.eye(len(covariance_NN)))
    except np.linalg.LinAlgError:  # rounding left it less than positive; ten times as slow
        values, vectors = np.linalg.eigh(covariance_NN)
        root: np.ndarray = vectors * np.sqrt(np.maximum(values, 0.0))
        return root
