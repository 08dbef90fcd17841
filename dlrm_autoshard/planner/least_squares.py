"""Non-negative least squares in relative error, pulled towards what is already believed.

    coefficients = fit_nonnegative(columns_NP, seconds_N, weights_N, believed_P)

Costs are sums of work times a price, and no price is negative. The pull (a few per cent of a column's own weight)
decides only what the samples leave open: with no samples the belief is returned, with many it hardly matters.
"""

from __future__ import annotations

import numpy as np


def fit_nonnegative(
    columns_NP: np.ndarray,
    target_N: np.ndarray,
    weight_N: np.ndarray,
    believed_P: np.ndarray,
    pull: float = 0.05,
    sweeps: int = 100,
) -> np.ndarray:
    """c >= 0 that minimises sum_n w_n (columns_n . c / target_n - 1)^2 plus the pull, by coordinate descent."""
    relative = columns_NP / np.maximum(target_N, 1e-6)[:, None]
    gram = relative.T @ (relative * weight_N[:, None])
    wanted = relative.T @ weight_N
    # The pull counts as `pull` samples of average size, so it fades as samples come in.
    average = np.diag(gram) / max(float(weight_N.sum()), 1e-9)
    strength = pull * np.maximum(average, 1e-12)
    coefficients = believed_P.copy()
    diagonal = np.diag(gram) + strength
    # slope[p]: how much the fit would gain from a little more of p; kept up to date as coefficients change.
    slope = wanted + strength * believed_P - (gram @ coefficients + strength * coefficients)
    for _ in range(sweeps):
        largest_change = 0.0
        for p in range(len(coefficients)):
            change = max(slope[p] / diagonal[p], -coefficients[p])
            if change != 0.0:
                coefficients[p] += change
                slope -= change * gram[p]
                slope[p] -= change * strength[p]
                largest_change = max(largest_change, abs(change) * diagonal[p] ** 0.5)
        if largest_change < 1e-5:
            break
    return coefficients
