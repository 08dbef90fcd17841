"""What exchanges took beside what was predicted: of each rank, as long as ranks stay as they are.

errors = ExchangeErrors.of(profiles, exchange_model)
errors.posterior(eras, spreads).log_evidence, errors.factors(eras, spreads)[rank]      # eras: of each profile
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.costs import EXCHANGE, IQR_OF_NORMAL, StepProfile, stages_W4
from dlrm_autoshard.planner.correction_terms import MOST_ROWS, Spreads
from dlrm_autoshard.planner.exchange_model import ExchangeModel
from dlrm_autoshard.planner.gaussian import Posterior, condition
from dlrm_autoshard.planner.replay import comms_of


@dataclass(frozen=True)
class ExchangeErrors:
    """off: of each profile [W, 2] log measured / predicted, not finite where nothing was exchanged; noise: of its
    figures, relative."""

    off: Sequence[np.ndarray]
    noise: Sequence[float]

    @staticmethod
    def of(profiles: Sequence[StepProfile], model: ExchangeModel) -> ExchangeErrors:
        return ExchangeErrors(
            [_off_W2(profile, model) for profile in profiles], [profile.noise / IQR_OF_NORMAL for profile in profiles]
        )

    def posterior(self, eras: Sequence[int], spreads: Spreads) -> Posterior:
        values, noise, keys = self._rows(eras)
        covariance = _covariance(keys, keys, spreads)
        return condition(covariance + np.diag(noise**2 + spreads.noise**2), values)

    def factors(self, eras: Sequence[int], spreads: Spreads) -> dict[int, tuple[float, float]]:
        """Log factors of each rank's exchanges, now."""
        wanted = np.array([(stage, rank, eras[-1], -1) for rank in range(len(self.off[-1])) for stage in (0, 1)])
        _, _, keys = self._rows(eras)
        mean = self.posterior(eras, spreads).mean(_covariance(wanted, keys, spreads))
        return {rank: (float(f), float(b)) for rank, (f, b) in enumerate(mean.reshape(-1, 2))}

    def _rows(self, eras: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(values, noise, [N, 4] stage, rank, era, profile) of the newest profiles, of many ranks few."""
        values, noise, keys = [], [], []
        newest = max(1, int((np.cumsum([off_W2.size for off_W2 in reversed(self.off)]) <= MOST_ROWS).sum()))
        for number in range(max(0, len(self.off) - newest), len(self.off)):
            off_W2 = self.off[number]
            for rank, stage in zip(*np.nonzero(np.isfinite(off_W2)), strict=True):
                values.append(off_W2[rank, stage])
                noise.append(self.noise[number])
                keys.append((stage, rank, eras[number], number))
        return np.array(values), np.array(noise), np.array(keys, dtype=int).reshape(-1, 4)


def _off_W2(profile: StepProfile, model: ExchangeModel) -> np.ndarray:
    sample = comms_of(profile)
    predicted_2 = model.ms(np.array(sample.dims, dtype=np.float64), profile.batch_size, profile.hosts)
    measured_W4 = stages_W4(profile.ranks)
    with np.errstate(divide="ignore", invalid="ignore"):
        off: np.ndarray = np.log(measured_W4[:, EXCHANGE] / predicted_2)
    return off


def _covariance(one: np.ndarray, other: np.ndarray, spreads: Spreads) -> np.ndarray:
    """A stage's, of all ranks and of each, as long as they stay as they are; each interval's; and what always is."""
    same = one[:, None, :] == other
    stage, rank, era, interval = (same[..., i] for i in range(4))
    ranks = spreads.exchange**2 * (rank & era) + spreads.scale**2 * era
    covariance: np.ndarray = stage * (ranks + spreads.exchanged**2 * interval + spreads.exchange**2)
    return covariance
