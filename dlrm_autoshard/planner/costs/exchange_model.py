"""What an exchange of pooled vectors takes: a latency, one more for each peer, and prices of the bytes that travel.

    model.ms(dims_W, batch_size=4096, hosts=(0, 0, 1, 1))    # [2] forward, backward; hosts: of each rank

A collective ends on all ranks when the slowest has sent and received, so one figure a plan and stage is fitted: by the
most that a rank sends, the most that one receives, and what travels in all. README.md says why.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_autoshard.planner.costs.least_squares import fit_nonnegative
from dlrm_autoshard.planner.costs.replay import CommsSample

BYTES_PER_VALUE = 4
PRIOR = np.array([0.15, 0.05, 0.30, 0.05, 0.10])
"""ms, ms a peer, ms per MB that the rank with most dims sends, that ranks receive on average, and that the rank with
fewest dims receives. gloo on loopback, or a 10 to 25 Gbit/s network. Only their proportions count once anything was
measured, on one host; between hosts they are upper bounds too."""
TRAFFIC, MOST_RECEIVED = slice(2, 5), 4
"""Columns of prices, and of what they are for: MB that a rank sends or receives, all three, and the last of them."""
NVLINK = (0.03, 0.005, 0.003, 0.0005, 0.001)
"""The same between GPUs of one host. Nobody has measured it here: half of the 450 GB/s a direction of an H100's or
H200's data sheet, in the proportions of the above."""
PRIOR_HOST = 0.60
"""ms per MB that leaves a host for another."""
PULL, PULL_BETWEEN_HOSTS, PULL_HOST = 0.002, 2.0, 0.05
"""How many measurements a price's prior counts as; the second where ranks are on several hosts. Between hosts the link
is what nobody knows: before plans differ enough to tell the prices apart, a slow exchange is put down to it."""

UNMEASURED, MEASURED = 0.5, 0.1
"""Standard deviation of the logarithm of what all exchanges are off by: those of another machine, of this one's."""
STEADY = 0.03
"""Noise from which a measurement counts half: a prior's proportions must not bend to one that is noisier."""


class ExchangeModel:
    """prices_SP: forward and backward, in the order of `exchange_work`, those of hosts last. spread: how far it may be
    off, `UNMEASURED` or `MEASURED`."""

    def __init__(self) -> None:
        self.prior_SP = np.stack([PRIOR, PRIOR])
        self.prices_SP, self.spread = self.prior_SP, UNMEASURED
        self._hosts: tuple[int, ...] | None = None  # of the ranks that the prices of hosts are for

    def ms(self, dims_W: np.ndarray, batch_size: int, hosts: Sequence[int] | None = None) -> np.ndarray:
        """[2] forward and backward exchange of ranks that own `dims_W`; 0 of one rank alone.

        hosts: number of each rank's host; None: all ranks are on one.
        """
        if len(dims_W) == 1:
            return np.zeros(2)
        work_P = exchange_work(dims_W, batch_size, hosts)
        ms: np.ndarray = self._prices_for(hosts, len(work_P)) @ work_P
        return ms

    def lines(
        self, total_dims: float, batch_size: int, world_size: int, hosts: Sequence[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """([2, W, 2], [2, W, 2]): what each rank's sending (0) and receiving (1) takes if it owns no dims, and what
        each dim adds; forward and backward.

        The exchange is the slowest rank's sending plus the slowest one's receiving, so a search need not know other
        ranks' dims. Only with several hosts is that an approximation: ranks of the same host are taken to own as much
        as the rank itself and the others to share the rest, as they do where plans are balanced.
        """
        base_2W2, per_dim_2W2 = np.zeros((2, world_size, 2)), np.zeros((2, world_size, 2))
        if world_size == 1:
            return base_2W2, per_dim_2W2
        host_W = np.zeros(world_size, dtype=int) if hosts is None else np.array(hosts)
        mb_per_dim = _mb_per_dim(batch_size, world_size)
        for host in np.unique(host_W):
            mates_W = host_W == host
            at = []
            for dims in (0.0, 1.0):
                left = (total_dims - dims * mates_W.sum()) / max(1, world_size - mates_W.sum())
                work_P = exchange_work(np.where(mates_W, dims, left), batch_size, hosts)
                sent, mean = dims * (world_size - 1), total_dims * (1 - 1 / world_size)
                work_P[TRAFFIC] = sent * mb_per_dim, mean * mb_per_dim, 0.0
                at.append(self._prices_for(hosts, len(work_P)) @ work_P)
            receiving_2 = self._prices_for(hosts, len(work_P))[:, MOST_RECEIVED] * mb_per_dim
            base_2W2[0, mates_W], base_2W2[1, mates_W] = at[0], receiving_2 * total_dims
            per_dim_2W2[0, mates_W], per_dim_2W2[1, mates_W] = at[1] - at[0], -receiving_2
        return base_2W2, per_dim_2W2

    def fit(self, samples: Sequence[CommsSample], weights: Sequence[float]) -> None:
        """Fits the prices to the slowest rank of each measured exchange, in relative error. Prices that the samples
        leave open keep their proportions to the others, as the prior has them."""
        kept = [(s, w) for s, w in zip(samples, weights, strict=True) if s.world_size > 1 and sum(s.dims) > 0]
        if not kept:
            return
        self._hosts = hosts = _several(kept[-1][0].hosts)
        # Prices of hosts can only be learned from ranks on the same hosts.
        kept = [(s, w) for s, w in kept if _several(s.hosts) in (None, hosts)]
        size = len(PRIOR) + (0 if hosts is None else len(set(hosts)))
        work_NP = np.zeros((len(kept), size))
        for row, (sample, _) in zip(work_NP, kept, strict=True):
            work_P = exchange_work(np.array(sample.dims, dtype=np.float64), sample.batch_size, _several(sample.hosts))
            row[: len(work_P)] = work_P
        ms_NS = np.array([[max(s.fwd_comms_ms), max(s.bwd_comms_ms)] for s, _ in kept])
        weight_N = np.array([weight / (1 + (s.noise / STEADY) ** 2) for s, weight in kept])
        prior_SP = self._prices_for(hosts, size, prior=True)
        pull_P = np.full(size, PULL if hosts is None else PULL_BETWEEN_HOSTS)
        pull_P[len(PRIOR) :] = PULL_HOST
        fitted = []
        for stage, prior_P in enumerate(prior_SP):
            scale = _weighted_median(ms_NS[:, stage] / (work_NP @ prior_P), weight_N)
            # Between hosts prices are only scaled down: what takes longer than they say is put down to the link.
            prior_P = prior_P * (scale if hosts is None else min(1.0, scale))
            fitted.append(fit_nonnegative(work_NP, ms_NS[:, stage], weight_N, prior_P, pull_P))
        self.prices_SP, self.spread = np.stack(fitted), MEASURED

    def load_prices(self, prices: Sequence[Sequence[float]]) -> None:
        """Prices that were fitted elsewhere, as the prior from now on."""
        self.prior_SP = np.zeros((2, len(PRIOR)))  # without the last in states of older versions
        for row_P, fitted in zip(self.prior_SP, prices, strict=True):
            row_P[: len(fitted)] = fitted[: len(PRIOR)]  # those of hosts are this job's own
        self.prices_SP, self._hosts, self.spread = self.prior_SP, None, UNMEASURED

    def _prices_for(self, hosts: Sequence[int] | None, size: int, *, prior: bool = False) -> np.ndarray:
        known = self.prior_SP if prior or (size > len(PRIOR) and _several(hosts) != self._hosts) else self.prices_SP
        count = size - known.shape[1]
        return known[:, :size] if count <= 0 else np.concatenate([known, np.full((2, count), PRIOR_HOST / count)], 1)


def exchange_work(dims_W: np.ndarray, batch_size: int, hosts: Sequence[int] | None = None) -> np.ndarray:
    """[P]: one exchange, peers, MB that the rank with most dims sends, that ranks receive on average, that the rank
    with fewest dims receives; then, where there are several hosts, MB that leave each of them. (What enters a host, and
    what goes from one to another, are proportional to sums of these: from plans alone they cannot be told apart.)"""
    world_size, total = len(dims_W), float(dims_W.sum())
    mb_per_dim = _mb_per_dim(batch_size, world_size)
    sent, mean = dims_W.max() * (world_size - 1), total * (1 - 1 / world_size)
    work = [1.0, world_size - 1.0, sent * mb_per_dim, mean * mb_per_dim, (total - dims_W.min()) * mb_per_dim]
    hosts = _several(hosts)
    if hosts is None:
        return np.array(work)
    inside_HW = np.array(hosts) == np.unique(hosts)[:, None]
    return np.concatenate([work, inside_HW @ dims_W * mb_per_dim * (world_size - inside_HW.sum(axis=1))])


def _mb_per_dim(batch_size: int, world_size: int) -> float:
    """That a rank with one dim sends to each other."""
    return batch_size / world_size * BYTES_PER_VALUE * 1e-6


def _several(hosts: Sequence[int] | None) -> tuple[int, ...] | None:
    """None where all ranks are on one host."""
    return tuple(hosts) if hosts is not None and len(set(hosts)) > 1 else None


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])
