"""Labels synthetic samples by a hidden logistic regression, so that AUC means something.

Every row of every table has an effect in [-1/2, 1/2); a sample's logit is the weighted sum of its rows' effects and of
its dense features. A DLRM can learn it, hot rows first: pooling computes the sum over a bag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dlrm_autoshard.data.hashing import Keys, key_of, mix64, stream, uniform

MEAN_LOGIT = -1.75
LOGIT_SPREAD = 2.0
"""With this spread the hidden model itself has AUC 0.85; the mean makes a quarter of the labels 1."""

_DENSE_SHARE = 0.4
_LABEL_STREAM = key_of("label")


@dataclass(frozen=True)
class HiddenModel:
    """A hidden logistic regression over dense features and rows."""

    weights_F: NDArray[np.float64]
    weights_T: NDArray[np.float64]
    steps_T: NDArray[np.float64]  # row r's effect is the fractional part of r * step, minus a half
    effects_mean: float = 0.0
    effects_spread: float = 1.0

    @staticmethod
    def draw(key: np.uint64, table_names: Sequence[str], num_dense: int) -> HiddenModel:
        weights_F = uniform(stream(key, 0, num_dense)) - 0.5
        table_keys_T = np.array([key_of(int(key), name) for name in table_names], np.uint64)
        return HiddenModel(
            weights_F=weights_F / max(1e-9, float(np.linalg.norm(weights_F))),
            weights_T=0.2 + 0.8 * uniform(mix64(table_keys_T + np.uint64(1))),
            steps_T=0.1 + 0.8 * uniform(mix64(table_keys_T + np.uint64(2))),
        )

    def add_effects(
        self,
        effects_B: NDArray[np.float64],
        table: int,
        rows_N: NDArray[np.float64],
        lengths_B: NDArray[np.int64],
        mean_pooling: float,
    ) -> None:
        """Adds each bag's effect, divided by the root of the mean length so that long bags do not dominate."""
        filled_B = np.flatnonzero(lengths_B)
        if len(filled_B) == 0:
            return
        effects_N = rows_N * self.steps_T[table]
        effects_N -= np.floor(effects_N)
        effects_N -= 0.5
        starts_B = (lengths_B.cumsum() - lengths_B)[filled_B]
        weight = self.weights_T[table] / np.sqrt(max(1.0, mean_pooling))
        effects_B[filled_B] += weight * np.add.reduceat(effects_N, starts_B)

    def calibrated(self, effects_B: NDArray[np.float64]) -> HiddenModel:
        """Rescales table effects to mean 0 and spread 1 over these samples."""
        return replace(self, effects_mean=float(effects_B.mean()), effects_spread=float(effects_B.std()) or 1.0)

    def logits(self, dense_BF: NDArray[np.float32], effects_B: NDArray[np.float64]) -> NDArray[np.float64]:
        share = _DENSE_SHARE if len(self.weights_F) else 0.0
        dense_B = (dense_BF - 0.5) * np.sqrt(12.0) @ self.weights_F  # uniform on [0, 1) to mean 0, spread 1
        tables_B = (effects_B - self.effects_mean) / self.effects_spread
        return MEAN_LOGIT + LOGIT_SPREAD * (np.sqrt(share) * dense_B + np.sqrt(1.0 - share) * tables_B)

    def labels(
        self, sample_keys_B: Keys, dense_BF: NDArray[np.float32], effects_B: NDArray[np.float64]
    ) -> NDArray[np.float32]:
        draws_B = uniform(mix64(sample_keys_B ^ _LABEL_STREAM))
        return (draws_B < 1.0 / (1.0 + np.exp(-self.logits(dense_BF, effects_B)))).astype(np.float32)
