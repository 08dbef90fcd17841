"""Non-negative least squares in relative error, pulled towards a prior.

    coefficients = fit_nonnegative(columns_NP, seconds_N, weights_N, prior_P)

Costs are sums of work times a price, and no price is negative. The pull (a few per cent of a column's own weight)
decides only what the samples leave open: with no samples the prior is returned, with many it hardly matters.
"""

from __future__ import annotations

import numpy as np


def fit_nonnegative(
    columns_NP: np.ndarray,
    target_N: np.ndarray,
    weight_N: np.ndarray,
    prior_P: np.ndarray,
    pull: float | np.ndarray = 0.05,
) -> np.ndarray:
    """Returns the c >= 0 that minimizes sum_n w_n (columns_n . c / target_n - 1)^2 plus the pull towards the prior,
    which may differ by column."""
    relative = columns_NP / np.maximum(target_N, 1e-6)[:, None]
    gram = relative.T @ (relative * weight_N[:, None])
    wanted = relative.T @ weight_N
    # The pull counts as `pull` samples of average size, so it fades as samples come in.
    average = np.diag(gram) / max(float(weight_N.sum()), 1e-9)
    strength = pull * np.maximum(average, 1e-12)
    return solve_nonnegative(gram + np.diag(strength), wanted + strength * prior_P)


def solve_nonnegative(matrix_PP: np.ndarray, wanted_P: np.ndarray) -> np.ndarray:
    """Returns the c >= 0 that minimizes c . matrix c / 2 - wanted . c, for a definite matrix (Lawson and Hanson's
    active set)."""
    scale_P = 1 / np.sqrt(np.diag(matrix_PP))
    matrix_PP, wanted_P = matrix_PP * scale_P * scale_P[:, None], wanted_P * scale_P
    solution, free = np.zeros(len(wanted_P)), np.zeros(len(wanted_P), dtype=bool)
    for _ in range(3 * len(wanted_P)):
        slope = np.where(free, -np.inf, wanted_P - matrix_PP @ solution)
        if slope.max() <= 1e-9:
            break
        free[slope.argmax()] = True  # what would gain most from leaving 0 may, and pushes others back to it
        while True:
            trial = np.zeros(len(wanted_P))
            trial[free] = np.linalg.solve(matrix_PP[np.ix_(free, free)], wanted_P[free])
            below = free & (trial <= 0)
            if not below.any():
                solution = trial
                break
            reach = (solution[below] / (solution[below] - trial[below])).min()
            solution = solution + reach * (trial - solution)
            free &= solution > 1e-12
            solution[~free] = 0.0
    return solution * scale_P
