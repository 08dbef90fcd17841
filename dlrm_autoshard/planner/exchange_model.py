"""What an exchange of pooled vectors takes: a latency, one more for each peer, and a price per byte sent and received.

    model.ms(dims_W, batch_size=4096)                        # [W, 2]: forward and backward of ranks with dims_W
    model.ms(dims_W, batch_size=4096, hosts=(0, 0, 1, 1))    # bytes between hosts have prices of their own

Rank r looks up its tables for the whole global batch and keeps 1/W of it: it sends dims_r x B/W values to each of the
other W - 1 ranks, and receives the others' dims for its own B/W samples. The gradients travel the same way back. What
leaves a host and what enters it goes over one link that its ranks share, and a host may have a slow one: each has its
own prices, as far as measurements say that it is unlike the others. There are few parameters on purpose: it
extrapolates to world sizes that were never measured.

Axes: W ranks, H hosts, P = 6 prices, S = 2 stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_autoshard.planner.least_squares import fit_nonnegative
from dlrm_autoshard.planner.replay import CommsSample

BYTES_PER_VALUE = 4
PRIOR = np.array([0.15, 0.05, 0.30, 0.15, 0.30, 0.30])
"""ms, ms per peer, ms per MB sent, ms per MB received: gloo on loopback or a 10 to 25 Gbit/s network. The same again
per MB that leaves the rank's host, and that enters it."""

PULL, PULL_BETWEEN_HOSTS = np.full(6, 0.05), np.array([2.0, 2.0, 2.0, 2.0, 0.05, 0.05])
"""How firmly the prior of each price holds. Between hosts the link is what nobody knows: before plans differ enough to
tell the prices apart, an exchange that takes longer than expected is put down to it."""


class ExchangeModel:
    """prices_SP: of all hosts together."""

    def __init__(self) -> None:
        self.prices_SP = np.stack([PRIOR, PRIOR])
        self._by_host: dict[int, np.ndarray] = {}  # [S, P] of hosts that were measured

    def ms(
        self, dims_W: np.ndarray, batch_size: int, hosts: Sequence[int] | None = None, total_dims: float | None = None
    ) -> np.ndarray:
        """[W, 2] forward and backward exchange of ranks that own `dims_W` (of `total_dims`; None: these are all).

        hosts: number of each rank's host; None: all ranks are on one.
        """
        if len(dims_W) == 1:
            return np.zeros((1, 2))
        hosts = hosts or (0,) * len(dims_W)
        total_dims = float(dims_W.sum()) if total_dims is None else total_dims
        prices_WSP = np.stack([self._by_host.get(host, self.prices_SP) for host in hosts])
        ms: np.ndarray = np.einsum("wp,wsp->ws", exchange_work(dims_W, total_dims, batch_size, hosts), prices_WSP)
        return ms

    def lines(
        self, total_dims: float, batch_size: int, world_size: int, hosts: Sequence[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """([W, 2], [W, 2]): each rank's exchange with no dims of its own, and what each dim adds.

        A straight line, so that a search need not know the other ranks' dims: those of the same host are taken to own
        as much as the rank itself, which they do where plans are balanced; far from there the line falls below 0.
        """
        at_0, at_1 = (self.ms(np.full(world_size, d), batch_size, hosts, total_dims) for d in (0.0, 1.0))
        return at_0, at_1 - at_0

    def fit(self, samples: Sequence[CommsSample], weights: Sequence[float]) -> None:
        """Fits the prices to measured exchanges, in relative error; what they leave open stays as it was."""
        rows, times, counts, host_of = [], [], [], []
        for sample, weight in zip(samples, weights, strict=True):
            if sample.world_size > 1 and sum(sample.dims) > 0:
                dims, hosts = np.array(sample.dims, dtype=np.float64), sample.hosts or (0,) * sample.world_size
                rows.append(exchange_work(dims, dims.sum(), sample.batch_size, hosts))
                times.append(np.stack([sample.fwd_comms_ms, sample.bwd_comms_ms], axis=1))
                counts.append(np.full(len(dims), weight))
                host_of.append(np.array(hosts))
        if not rows:
            return
        work_NP, ms_NS, weight_N, host_N = map(np.concatenate, (rows, times, counts, host_of))
        self.prices_SP = _fitted(work_NP, ms_NS, weight_N, self.prices_SP)
        self._by_host = {}
        for host in np.unique(host_N).tolist() if host_N.any() else []:
            own = host_N == host
            self._by_host[host] = _fitted(work_NP[own], ms_NS[own], weight_N[own], self.prices_SP)

    def load_prices(self, prices: Sequence[Sequence[float]]) -> None:
        """As they were saved; before hosts had prices of their own there were four."""
        self.prices_SP = np.stack([PRIOR, PRIOR])
        self.prices_SP[:, : len(prices[0])] = np.array(prices)
        self._by_host = {}  # measured anew: another job, other hosts


def _fitted(work_NP: np.ndarray, ms_NS: np.ndarray, weight_N: np.ndarray, prior_SP: np.ndarray) -> np.ndarray:
    pull = PULL_BETWEEN_HOSTS if work_NP[:, 4:].any() else PULL
    return np.stack([fit_nonnegative(work_NP, ms_NS[:, s], weight_N, prior_SP[s], pull) for s in range(len(prior_SP))])


def exchange_work(dims_W: np.ndarray, total_dims: float, batch_size: int, hosts: Sequence[int]) -> np.ndarray:
    """[W, P]: one exchange, peers, MB sent, MB received, MB that leave and that enter the rank's host."""
    world_size = len(hosts)
    host_W = np.array(hosts)
    mates_W = (host_W == host_W[:, None]).sum(axis=1)
    host_dims_W = (dims_W * (host_W == host_W[:, None])).sum(axis=1)
    mb_per_dim = batch_size / world_size * BYTES_PER_VALUE * 1e-6
    return np.stack(
        [
            np.ones(world_size),
            np.full(world_size, world_size - 1.0),
            dims_W * mb_per_dim * (world_size - 1),
            (total_dims - dims_W) * mb_per_dim,
            host_dims_W * mb_per_dim * (world_size - mates_W),
            (total_dims - host_dims_W) * mb_per_dim * mates_W * (mates_W < world_size),
        ],
        axis=1,
    )
