"""What an exchange of pooled vectors takes: a latency, one more for each peer, and a price per byte sent and received.

    law.ms(dims_N, total_dims=512, batch_size=4096, world_size=4)     # [N, 2]: forward, backward of ranks with dims_N

Rank r looks up its tables for the whole global batch and keeps 1/W of it: it sends dims_r x B/W values to each of the
other W - 1 ranks, and receives the others' dims for its own B/W samples. The gradients travel the same way back. The
law has few parameters on purpose: it extrapolates to world sizes that were never measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_autoshard.planner.least_squares import fit_nonnegative
from dlrm_autoshard.planner.replay import CommsSample

BYTES_PER_VALUE = 4
BELIEVED = np.array([0.15, 0.05, 0.30, 0.15])
"""ms, ms per peer, ms per MB sent, ms per MB received: gloo on loopback or a 10 to 25 Gbit/s network."""


class CommsLaw:
    def __init__(self) -> None:
        self.prices_S4 = np.stack([BELIEVED, BELIEVED])

    def ms(self, dims_N: np.ndarray, total_dims: float, batch_size: int, world_size: int) -> np.ndarray:
        """[N, 2] forward and backward exchange of ranks that own `dims_N` of `total_dims`."""
        if world_size == 1:
            return np.zeros((len(dims_N), 2))
        ms: np.ndarray = exchange_work(dims_N, total_dims, batch_size, world_size) @ self.prices_S4.T
        return ms

    def fit(self, samples: Sequence[CommsSample], weights: Sequence[float]) -> None:
        """Fits the prices to measured exchanges, in relative error; what they leave open stays as it was."""
        rows, times, counts = [], [], []
        for sample, weight in zip(samples, weights, strict=True):
            if sample.world_size > 1 and sum(sample.dims) > 0:
                dims = np.array(sample.dims, dtype=np.float64)
                rows.append(exchange_work(dims, dims.sum(), sample.batch_size, sample.world_size))
                times.append(np.stack([sample.fwd_comms_ms, sample.bwd_comms_ms], axis=1))
                counts.append(np.full(len(dims), weight))
        if rows:
            columns, ms, weight_N = np.concatenate(rows), np.concatenate(times), np.concatenate(counts)
            for stage in range(2):
                self.prices_S4[stage] = fit_nonnegative(columns, ms[:, stage], weight_N, self.prices_S4[stage])


def exchange_work(dims_N: np.ndarray, total_dims: float, batch_size: int, world_size: int) -> np.ndarray:
    """[N, 4]: one exchange, peers, MB sent, MB received."""
    mb_per_dim = batch_size / world_size * BYTES_PER_VALUE * 1e-6
    return np.stack(
        [
            np.ones(len(dims_N)),
            np.full(len(dims_N), world_size - 1.0),
            dims_N * mb_per_dim * (world_size - 1),
            (total_dims - dims_N) * mb_per_dim,
        ],
        axis=1,
    )
