"""How slow each rank is at computation, learned from real steps.

    speed = RankSpeed()
    speed.learn(profile_weights, predicted)      # observed / predicted, newest profile first in weight
    speed.factor(rank=1)                         # (1.9, 1.9): takes 1.9 times what the cost model says

A cost says "these tables take x ms", a rank says "here everything takes 1.9 times as long". One profile cannot tell a
slow rank from a table set that is mispredicted, so small differences between ranks (about the cost model's own error)
are left to the cost model, while large ones are a slow or starved rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MODEL_ERROR = 0.07
"""Relative difference between ranks that is about as likely the cost model's error as the rank's speed."""


class RankSpeed:
    def __init__(self) -> None:
        self.factors: dict[int, tuple[float, float]] = {}

    def factors_W2(self, world_size: int, believed_speed: Sequence[float] | None) -> np.ndarray:
        """[W, 2] forward and backward; `believed_speed` counts for ranks that were never observed."""
        believed = [1.0] * world_size if believed_speed is None else [1.0 / speed for speed in believed_speed]
        return np.array([self.factors.get(rank, (believed[rank],) * 2) for rank in range(world_size)])

    def learn(self, ratios: Mapping[int, Sequence[tuple[float, float, float]]]) -> None:
        """`ratios[rank]`: (forward ratio, backward ratio, weight) of observed to predicted, one a profile."""
        log_of = {
            rank: np.average(np.log([(f, b) for f, b, _ in seen]), axis=0, weights=[max(w, 1e-12) for _, _, w in seen])
            for rank, seen in ratios.items()
            if seen
        }
        if not log_of:
            return
        common = np.median(np.stack(list(log_of.values())), axis=0)
        for rank, logs in log_of.items():
            # A slow rank is slow in both stages; the mean of the two is steadier than either.
            own = float((logs - common).mean())
            shrunk = own * own**2 / (own**2 + MODEL_ERROR**2)
            self.factors[rank] = (float(np.exp(common[0] + shrunk)), float(np.exp(common[1] + shrunk)))

    def to_json(self) -> dict[str, Any]:
        return {str(rank): list(factor) for rank, factor in self.factors.items()}

    def load_json(self, record: Mapping[str, Any]) -> None:
        self.factors = {int(rank): (float(f[0]), float(f[1])) for rank, f in record.items()}
