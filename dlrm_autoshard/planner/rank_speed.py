"""How slow each rank is at computation, learned from real steps.

    speed = RankSpeed()
    then = speed.learn(ratios, weights)     # one entry a profile, oldest first: {rank: (forward, backward)} and weight
    speed.factors[1]                        # (1.9, 1.9): rank 1 now takes 1.9 times what the cost model says
    then[0][1]                              # (1.0, 1.0): and this when the first profile was measured

A cost says "these tables take x ms", a rank says "here everything takes 1.9 times as long". One profile cannot tell a
slow rank from a table set that is mispredicted, so small differences between ranks (about the cost model's own error)
are left to the cost model, while large ones are a slow or starved rank. Speeds come and go: a profile speaks for
another one's time only as far as its ranks were as unequal then, so that a change is believed at once, and costs that
were measured before it are not mistaken for costs after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MODEL_ERROR = 0.07
"""Relative difference between ranks that is about as likely the cost model's error as the rank's speed."""

ALIKE = 2 * MODEL_ERROR
"""Two profiles whose ranks differ from one another by so much less are of one time."""


class RankSpeed:
    def __init__(self) -> None:
        self.factors: dict[int, tuple[float, float]] = {}

    def factors_W2(self, world_size: int, expected_speed: Sequence[float] | None) -> np.ndarray:
        """[W, 2] forward and backward; `expected_speed` counts for ranks that were never observed."""
        believed = [1.0] * world_size if expected_speed is None else [1.0 / speed for speed in expected_speed]
        return np.array([self.factors.get(rank, (believed[rank],) * 2) for rank in range(world_size)])

    def learn(
        self, ratios: Sequence[Mapping[int, tuple[float, float]]], weights: Sequence[float]
    ) -> list[dict[int, tuple[float, float]]]:
        """`ratios[i][rank]`: observed / predicted of forward and backward in the i-th profile, oldest first. Returns
        every rank's factors at the time of each profile; the newest ones are `factors` from now on."""
        logs = [{rank: np.log(ratio) for rank, ratio in seen.items()} for seen in ratios]
        common = [np.median(np.stack(list(seen.values())), axis=0) if seen else np.zeros(2) for seen in logs]
        # A slow rank is slow in both stages; the mean of the two is steadier than either.
        own = [
            {rank: float((log - c).mean()) for rank, log in seen.items()} for seen, c in zip(logs, common, strict=True)
        ]
        apart = [_from_the_others(ranks) for ranks in own]
        then = []
        for now in apart:
            share = [w * _likeness(now, other) if other else 0.0 for w, other in zip(weights, apart, strict=True)]
            base = np.average(np.stack(common), axis=0, weights=share) if sum(share) > 0 else np.zeros(2)
            factors = {}
            for rank in now:
                of_rank = [w if rank in other else 0.0 for w, other in zip(share, own, strict=True)]
                mean = np.average([other.get(rank, 0.0) for other in own], weights=of_rank)
                difference = np.average([other.get(rank, 0.0) for other in apart], weights=of_rank)
                believed = mean * difference**2 / (difference**2 + MODEL_ERROR**2)
                factors[rank] = (float(np.exp(base[0] + believed)), float(np.exp(base[1] + believed)))
            then.append(factors)
        for factors in then:  # a rank that owns nothing now keeps what was last known of it
            self.factors.update(factors)
        return then

    def to_json(self) -> dict[str, Any]:
        return {str(rank): list(factor) for rank, factor in self.factors.items()}

    def load_json(self, record: Mapping[str, Any]) -> None:
        self.factors = {int(rank): (float(f[0]), float(f[1])) for rank, f in record.items()}


def _from_the_others(own: Mapping[int, float]) -> dict[int, float]:
    """How far each rank is from the middle of the others; of two, each is only half as far from the middle of both."""
    return {
        rank: value - float(np.median([other for r, other in own.items() if r != rank])) if len(own) > 1 else 0.0
        for rank, value in own.items()
    }


def _likeness(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """1 where the ranks differ from one another as they did in the other profile; 0 where they are other ranks now."""
    apart = max((abs(one[rank] - other[rank]) for rank in one.keys() & other.keys()), default=0.0)
    return float(np.exp(-((apart / ALIKE) ** 2) / 2)) + 1e-9
