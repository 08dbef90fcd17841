"""How sets of tables load their rank: what fusing changes depends on that, smoothly.

loads_NL = log_loads(summary_NK)                 # of sets, from their summaries
known = LoadRange.of(loads_NL)
known.features(loads_NL)                         # [N, F]: quadratic, for a linear model with a normal prior
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.planner.costs.cost_model import LEAST_LOAD, LOADS, LOGGED, tables_that_count

# Axes: N sets of tables, K summary columns, L loads (how many tables count, how many there are, then the
# cost model's), F features.

_LOADS = slice(LOGGED.stop - len(LOADS), LOGGED.stop)
_NUM_LOADS = 2 + len(LOADS)
_FIRST, _SECOND = np.triu_indices(_NUM_LOADS)
_OF_PRODUCTS = np.where(_FIRST == _SECOND, 0.5, 0.5**0.5)
NUM_FEATURES = 1 + _NUM_LOADS + _NUM_LOADS * (_NUM_LOADS + 1) // 2


def log_loads(summary_NK: np.ndarray) -> np.ndarray:
    """Returns natural logarithms [..., L] of the effective number of tables, of all tables (kernels may be launched
    per table, however light), and of ids, bytes read and bytes of distinct rows."""
    loads = np.empty((*summary_NK.shape[:-1], _NUM_LOADS), dtype=summary_NK.dtype)
    loads[..., 0] = tables_that_count(summary_NK)
    loads[..., 1] = np.maximum(summary_NK[..., 0], 1.0)
    loads[..., 2:] = np.maximum(summary_NK[..., _LOADS], LEAST_LOAD)
    return np.log(loads, out=loads)


def many(log_NL: np.ndarray) -> np.ndarray:
    """Returns [...] from 0, for a table alone, which is fused with nothing, towards 1 for many tables of equal cost."""
    found: np.ndarray = 1 - np.exp(-log_NL[..., 0])
    return found


@dataclass(frozen=True)
class LoadRange:
    """The range of loads [L] of measured sets. Loads outside count as the nearest inside."""

    middle_L: np.ndarray
    low_L: np.ndarray
    high_L: np.ndarray

    @staticmethod
    def of(log_NL: np.ndarray) -> LoadRange:
        sets = log_NL[many(log_NL) > 0]
        sets = sets if len(sets) else np.zeros((1, _NUM_LOADS))
        return LoadRange(sets.mean(axis=0), sets.min(axis=0), sets.max(axis=0))

    def features(self, log_NL: np.ndarray) -> np.ndarray:
        """Returns [..., F], whose products are (1 + z . z' / 2) squared, where z are loads relative to the middle."""
        z = self._beside_the_middle(log_NL)
        products = z[..., _FIRST] * z[..., _SECOND] * _OF_PRODUCTS
        return np.concatenate([np.ones_like(z[..., :1]), z, products], axis=-1)

    def form(self, weights_FS: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Returns a fast function, in float32, from loads to features @ weights, for searches."""
        constant_S, linear_LS, products_PS = np.split(weights_FS.astype(np.float32), [1, 1 + _NUM_LOADS])
        square_LSL = np.zeros((_NUM_LOADS, weights_FS.shape[1], _NUM_LOADS), dtype=np.float32)
        square_LSL[_FIRST, :, _SECOND] = products_PS * _OF_PRODUCTS[:, None]
        wide = square_LSL.reshape(_NUM_LOADS, -1)

        def value(log_NL: np.ndarray) -> np.ndarray:
            z = self._beside_the_middle(log_NL).astype(np.float32)
            squares = (z @ wide).reshape(*z.shape[:-1], *square_LSL.shape[1:])
            found: np.ndarray = constant_S + z @ linear_LS + (squares @ z[..., None])[..., 0]
            return found

        return value

    def _beside_the_middle(self, log_NL: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.clip(log_NL, self.low_L, self.high_L) - self.middle_L
        return found
