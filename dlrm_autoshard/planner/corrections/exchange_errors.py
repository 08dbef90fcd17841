"""Errors of predicted exchanges, for each rank, as long as ranks stay as they are.

errors = ExchangeErrors.of(profiles, exchange_model)
errors.log_evidence(eras, spreads), errors.factors(eras, spreads)[rank]      # eras: of each profile
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.costs import EXCHANGE, StepProfile, stages_W4
from dlrm_autoshard.planner.corrections.terms import Spreads
from dlrm_autoshard.planner.costs.exchange_model import ExchangeModel
from dlrm_autoshard.planner.costs.replay import comms_of

Term = tuple[str | int, ...]
"""("always",), ("era", era), ("rank", era, rank) or ("interval", profile)"""


@dataclass(frozen=True)
class ExchangeErrors:
    """Errors of predicted exchanges by rank. off: [W, 2] of each profile, log(measured / predicted), not finite where
    nothing was exchanged; noise: [W, 2] of these. A profile's noise is that of all four stages and counts as equal ms
    in each, so a short exchange of a rank whose core is shared tells nothing.

    A stage's logarithm is a sum of four terms: a constant error, a scale for each era, a factor for each rank in it,
    and the interval's own. These are far fewer than the figures on many ranks, so the terms are solved for, not the
    figures' covariance.
    """

    off: Sequence[np.ndarray]
    noise: Sequence[np.ndarray]

    @staticmethod
    def of(profiles: Sequence[StepProfile], model: ExchangeModel) -> ExchangeErrors:
        return ExchangeErrors([_off_W2(profile, model) for profile in profiles], [_noise_W2(p) for p in profiles])

    def log_evidence(self, eras: Sequence[int], spreads: Spreads) -> float:
        """Returns the log evidence of the eras, one per profile."""
        return sum(self._solved(stage, eras, spreads)[1] for stage in (0, 1))

    def factors(self, eras: Sequence[int], spreads: Spreads) -> dict[int, tuple[float, float]]:
        """Returns log factors of each rank's exchanges now."""
        always, era, now = ("always",), ("era", eras[-1]), eras[-1]
        by_stage = [self._solved(stage, eras, spreads)[0] for stage in (0, 1)]
        shared = [terms.get(always, 0.0) + terms.get(era, 0.0) for terms in by_stage]
        ranks = range(len(self.off[-1]))
        found = [[shared[stage] + by_stage[stage].get(("rank", now, rank), 0.0) for stage in (0, 1)] for rank in ranks]
        return {rank: (forward, backward) for rank, (forward, backward) in enumerate(found)}

    def _solved(self, stage: int, eras: Sequence[int], spreads: Spreads) -> tuple[dict[Term, float], float]:
        """Returns the terms' posterior means and the evidence, for a linear model with normal terms and noise."""
        columns: dict[Term, int] = {}
        rows, values, noise = [], [], []
        for number, (off_W2, era) in enumerate(zip(self.off, eras, strict=True)):
            for rank in np.flatnonzero(np.isfinite(off_W2[:, stage])).tolist():
                terms: list[Term] = [("always",), ("era", era), ("rank", era, rank), ("interval", number)]
                rows.append([columns.setdefault(term, len(columns)) for term in terms])
                values.append(off_W2[rank, stage])
                noise.append(self.noise[number][rank, stage])
        if not values:
            return {}, 0.0
        own = {
            "always": spreads.exchange,
            "era": spreads.scale,
            "rank": spreads.exchange,
            "interval": spreads.exchanged,
        }
        spread_K = np.array([own[str(term[0])] for term in columns])
        scatter_N = np.sqrt(np.array(noise) ** 2 + spreads.exchange_noise**2)
        design_NK = np.zeros((len(values), len(columns)))
        np.put_along_axis(design_NK, np.array(rows), 1.0, axis=1)
        design_NK *= spread_K / scatter_N[:, None]  # of terms and noise with a spread of 1
        value_N = np.array(values) / scatter_N
        precision_KK = design_NK.T @ design_NK + np.eye(len(columns))
        mean_K = np.linalg.solve(precision_KK, design_NK.T @ value_N)
        left = float(value_N @ (value_N - design_NK @ mean_K))
        log_determinant = float(np.linalg.slogdet(precision_KK)[1]) + 2 * float(np.log(scatter_N).sum())
        return dict(zip(columns, (spread_K * mean_K).tolist(), strict=True)), -0.5 * (left + log_determinant)


def _noise_W2(profile: StepProfile) -> np.ndarray:
    ms_W4 = stages_W4(profile.ranks)
    noise_ms_W1 = profile.standard_error * ms_W4.sum(axis=1, keepdims=True) / ms_W4.shape[1] ** 0.5
    noise: np.ndarray = noise_ms_W1 / np.maximum(ms_W4[:, EXCHANGE], 1e-9)
    return noise


def _off_W2(profile: StepProfile, model: ExchangeModel) -> np.ndarray:
    sample = comms_of(profile)
    predicted_2 = model.ms(np.array(sample.dims, dtype=np.float64), profile.batch_size, profile.hosts)
    measured_W4 = stages_W4(profile.ranks)
    with np.errstate(divide="ignore", invalid="ignore"):
        off: np.ndarray = np.log(measured_W4[:, EXCHANGE] / predicted_2)
    return off
