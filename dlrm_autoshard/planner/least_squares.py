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
    sweeps: int = 300,
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
    for _ in range(sweeps):
        largest_change = 0.0
        for p in range(len(coefficients)):
            gradient = wanted[p] + strength[p] * believed_P[p] - gram[p] @ coefficients + gram[p, p] * coefficients[p]
            updated = max(gradient / diagonal[p], 0.0)
            largest_change = max(largest_change, abs(updated - coefficients[p]) * float(np.sqrt(diagonal[p])))
            coefficients[p] = updated
        if largest_change < 1e-6:
            break
    return coefficients
