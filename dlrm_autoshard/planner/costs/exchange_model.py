"""Predicts what an exchange of pooled vectors takes: a latency, one more a peer, and prices of the bytes that travel.

    model.ms(dims_W, batch_size=4096, hosts=(0, 0, 1, 1))    # [2] forward, backward; hosts: the host of each rank

A collective ends on all ranks when the slowest has sent and received: by the most that a rank sends, the most that one
receives, what travels in all, and the slowest link between hosts, one figure a plan is fitted. DERIVATIONS.md says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.planner.costs.least_squares import fit_nonnegative
from dlrm_autoshard.planner.costs.replay import CommsSample

# Axes: S stages (forward, backward), P prices, W ranks, H hosts, L links (each host's way out, then each one's way in),
# N samples.

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
PRIOR_LINK = 0.60
"""ms per MB that crosses a host's link in one direction."""
PULL, PULL_BETWEEN_HOSTS, PULL_LINK, PULL_ALIKE = 0.002, 0.1, 0.01, 0.01
"""How many measurements a prior counts as: that of the prices within one host, the same where ranks are on several
hosts, that of a link, and the belief that all links are alike. The link is what nobody knows: before plans differ
enough to tell the prices apart, a slow exchange is put down to it."""
MOST_PASSES, ROUNDS, OTHER = 20, 4, (0.25, 4.0)
"""Refits with the slowest links found anew, which settle after two to five. Rounds in which one link at a time is tried
at these multiples of its price, where links that are alike do not explain what was measured."""

UNMEASURED, MEASURED = 0.5, 0.1
"""Standard deviation of the logarithm of the error that all exchanges share: unmeasured here, and measured."""
STEADY = 0.03
"""Noise from which a measurement counts half: a prior's proportions must not bend to one that is noisier."""


class ExchangeModel:
    """Predicts exchanges from prices. prices_SP: in the order of `exchange_work`. spread: how far all prices may be
    off together, `UNMEASURED` or `MEASURED`."""

    def __init__(self) -> None:
        self.prior_SP = np.stack([PRIOR, PRIOR])
        self.prices_SP, self.spread = self.prior_SP, UNMEASURED
        self._link_SL: np.ndarray | None = None
        self._hosts: tuple[int, ...] | None = None  # the ranks' hosts that `_link_SL` was fitted for

    def ms(self, dims_W: np.ndarray, batch_size: int, hosts: Sequence[int] | None = None) -> np.ndarray:
        """Returns ms [2] of the forward and backward exchange when ranks own `dims_W`; 0 for one rank. hosts: each
        rank's host; None: one host."""
        if len(dims_W) == 1:
            return np.zeros(2)
        ms: np.ndarray = self.prices_SP @ exchange_work(dims_W, batch_size)
        links = self.links(len(dims_W), batch_size, hosts)
        return ms + links.ms(links.dims(dims_W)).max(axis=-2)

    def links(self, world_size: int, batch_size: int, hosts: Sequence[int] | None = None) -> HostLinks:
        """Returns the model of hosts' links, whose ms add to those of `lines`."""
        several = several_hosts(hosts)
        if several is None:
            return HostLinks(np.zeros(world_size, dtype=np.int64), batch_size, np.zeros((2, 2)))
        known = self._link_SL is not None and several == self._hosts
        price_SL = self._link_SL if known else np.full((2, 2 * len(set(several))), PRIOR_LINK)
        assert price_SL is not None
        return HostLinks(np.array(several), batch_size, price_SL)

    def lines(self, total_dims: float, batch_size: int, world_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns ([2, 2], [2, 2]): ms that a rank without dims takes to send (0) and to receive (1), and ms per
        dim; forward and backward. The slowest rank's sending plus the slowest rank's receiving is the exchange
        within one host, so a search needs to know no other ranks' dims."""
        base_22, per_dim_22 = np.zeros((2, 2)), np.zeros((2, 2))
        if world_size > 1:
            mb, none = _mb_per_dim(batch_size, world_size), np.zeros(world_size)
            fixed_P = exchange_work(none, batch_size)
            fixed_P[TRAFFIC.start + 1] = total_dims * (1 - 1 / world_size) * mb
            receiving_2 = self.prices_SP[:, MOST_RECEIVED] * mb
            base_22[:] = self.prices_SP @ fixed_P, receiving_2 * total_dims
            per_dim_22[:] = self.prices_SP[:, TRAFFIC.start] * (world_size - 1) * mb, -receiving_2
        return base_22, per_dim_22

    def fit(self, samples: Sequence[CommsSample], weights: Sequence[float]) -> None:
        """Fits prices to the slowest rank of each measured exchange, in relative error. Prices that the samples
        leave open keep the prior's proportions."""
        kept = [(s, w) for s, w in zip(samples, weights, strict=True) if s.world_size > 1 and sum(s.dims) > 0]
        if not kept:
            return
        hosts = several_hosts(kept[-1][0].hosts)
        # Prices of links can only be learned from ranks on the same hosts.
        kept = [(s, w) for s, w in kept if several_hosts(s.hosts) in (None, hosts)]
        work_NP = np.stack([exchange_work(np.array(s.dims, dtype=np.float64), s.batch_size) for s, _ in kept])
        crossing_NL = np.zeros((len(kept), 0 if hosts is None else 2 * len(set(hosts))))
        if hosts is not None:
            host_W = np.array(hosts)
            for row_L, (sample, _) in zip(crossing_NL, kept, strict=True):
                if several_hosts(sample.hosts) == hosts:
                    dims_H = host_dims(np.array(sample.dims), host_W)
                    row_L[:] = crossing_mb(dims_H, sample.batch_size, host_W)
        ms_NS = np.array([[max(s.fwd_comms_ms), max(s.bwd_comms_ms)] for s, _ in kept])
        weight_N = np.array([weight / (1 + (s.noise / STEADY) ** 2) for s, weight in kept])
        fitted = [
            _fitted(work_NP, crossing_NL, ms_N, weight_N, prior_P)
            for ms_N, prior_P in zip(ms_NS.T, self.prior_SP, strict=True)
        ]
        self.prices_SP, self.spread = np.stack([prices_P for prices_P, _ in fitted]), MEASURED
        self._hosts, self._link_SL = hosts, np.stack([link_L for _, link_L in fitted])

    def load_prices(self, prices: Sequence[Sequence[float]]) -> None:
        """Makes prices that were fitted elsewhere the prior. Links are fitted for each job."""
        self.prior_SP = np.zeros((2, len(PRIOR)))  # states of older versions lack the last column
        for row_P, fitted in zip(self.prior_SP, prices, strict=True):
            row_P[: len(fitted)] = fitted[: len(PRIOR)]
        self.prices_SP, self.spread = self.prior_SP, UNMEASURED
        self._hosts, self._link_SL = None, None


@dataclass(frozen=True)
class HostLinks:
    """Predicts what the links of a job's hosts take, at price_SL ms per MB: all ranks wait for the slowest. host_W:
    each rank's host; on a single host, links take nothing."""

    host_W: np.ndarray
    batch_size: int
    price_SL: np.ndarray

    def dims(self, dims_NW: np.ndarray) -> np.ndarray:
        """Returns the dims [..., H] that each host owns, from the ranks'."""
        return host_dims(dims_NW, self.host_W)

    def ms(self, dims_NH: np.ndarray) -> np.ndarray:
        """Returns ms [..., H, 2] of the busier direction of each host's link, forward and backward."""
        ms_NSL = self.price_SL * crossing_mb(dims_NH, self.batch_size, self.host_W)[..., None, :]
        busier_NSH: np.ndarray = np.maximum(*np.split(ms_NSL, 2, axis=-1))
        return np.swapaxes(busier_NSH, -1, -2)

    def ms_after(self, dims_W: np.ndarray, source: int, to_N: np.ndarray, moved_N: np.ndarray) -> np.ndarray:
        """Returns `ms` [N, H, 2] after `moved_N` dims have gone from rank `source` to ranks `to_N`."""
        dims_NH = np.tile(self.dims(dims_W), (len(to_N), 1))
        dims_NH[:, self.host_W[source]] -= moved_N
        dims_NH[np.arange(len(to_N)), self.host_W[to_N]] += moved_N
        return self.ms(dims_NH)

    def ranks_behind(self, dims_W: np.ndarray) -> list[int]:
        """Returns the ranks of the hosts with the slowest links; none on a single host."""
        slowest = self.ms(self.dims(dims_W)).argmax(axis=0)
        behind: list[int] = np.flatnonzero(np.isin(self.host_W, slowest)).tolist()
        return behind if self.host_W.any() else []


def exchange_work(dims_W: np.ndarray, batch_size: int) -> np.ndarray:
    """Returns [P]: 1, the number of peers, and MB sent by the rank with most dims, received on average, and received
    by the rank with fewest dims."""
    world_size, total = len(dims_W), float(dims_W.sum())
    mb_per_dim = _mb_per_dim(batch_size, world_size)
    sent, mean = dims_W.max() * (world_size - 1), total * (1 - 1 / world_size)
    work = [1.0, world_size - 1.0, sent * mb_per_dim, mean * mb_per_dim, (total - dims_W.min()) * mb_per_dim]
    return np.array(work)


def host_dims(dims_NW: np.ndarray, host_W: np.ndarray) -> np.ndarray:
    """Returns the dims [..., H] that each host owns, from the ranks'."""
    on_host_WH = host_W[:, None] == np.arange(host_W.max() + 1)
    dims_NH: np.ndarray = dims_NW.astype(np.float64) @ on_host_WH
    return dims_NH


def crossing_mb(dims_H: np.ndarray, batch_size: int, hosts: np.ndarray) -> np.ndarray:
    """Returns [..., 2 H]: MB of vectors that leave each host, then MB that enter each, for dims_H [..., H] owned by
    hosts. As many gradients travel the other way."""
    ranks_H = np.bincount(hosts)
    leaving = dims_H * (len(hosts) - ranks_H)
    entering = (dims_H.sum(axis=-1, keepdims=True) - dims_H) * ranks_H
    crossing: np.ndarray = np.concatenate([leaving, entering], axis=-1) * _mb_per_dim(batch_size, len(hosts))
    return crossing


def several_hosts(hosts: Sequence[int] | None) -> tuple[int, ...] | None:
    """Returns the ranks' hosts, numbered from 0 in the order of ranks; None where all ranks are on one host."""
    if hosts is None or len(set(hosts)) == 1:
        return None
    numbers = list(dict.fromkeys(hosts))
    return tuple(numbers.index(host) for host in hosts)


def _fitted(
    work_NP: np.ndarray, crossing_NL: np.ndarray, ms_N: np.ndarray, weight_N: np.ndarray, prior_P: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the prices ([P], [L]) of one stage."""
    links, busiest_N = crossing_NL.shape[1], crossing_NL.max(axis=1, initial=0)
    scale = _weighted_median(ms_N / (work_NP @ prior_P + PRIOR_LINK * busiest_N), weight_N)
    if not links:
        return fit_nonnegative(work_NP, ms_N, weight_N, prior_P * scale, PULL), np.zeros(0)
    # Between hosts prices are only scaled down: what takes longer than they say is put down to the links.
    prior_P, prior_link = prior_P * min(1.0, scale), PRIOR_LINK * min(1.0, scale)
    pull = np.append(np.full(len(prior_P), PULL_BETWEEN_HOSTS), PULL_LINK)
    columns = np.column_stack([work_NP, busiest_N])
    *prices, alike = fit_nonnegative(columns, ms_N, weight_N, np.append(prior_P, prior_link), pull)
    links_alike = np.full(links, alike)
    samples = _Samples(work_NP, crossing_NL, ms_N, weight_N, np.concatenate([prior_P, links_alike]))
    best = samples.priced(np.array(prices), links_alike)
    if best.error > STEADY:  # alike links do not explain it: which ones are slower, or faster?
        groups = [*np.eye(links, dtype=bool), np.arange(links) < links // 2]  # each link, and all ways out
        for _ in range(ROUNDS):
            known_L = np.where(best.link_L > 0, best.link_L, prior_link)
            starts = [known_L * np.where(some_L, by, 1.0) for some_L in groups for by in OTHER]
            other = min((samples.fitted(start_L) for start_L in starts), key=lambda fit: fit.error)
            if other.error > best.error * 0.99:
                break
            best = other
    return best.prices_P, best.link_L


@dataclass(frozen=True)
class _Fit:
    """Prices of one stage. error: relative RMS."""

    prices_P: np.ndarray
    link_L: np.ndarray
    error: float


@dataclass(frozen=True)
class _Samples:
    """Measured exchanges of one stage. prior: prices within a host, then of each link."""

    work_NP: np.ndarray
    crossing_NL: np.ndarray
    ms_N: np.ndarray
    weight_N: np.ndarray
    prior: np.ndarray

    def priced(self, prices_P: np.ndarray, link_L: np.ndarray) -> _Fit:
        predicted_N = self.work_NP @ prices_P + (self.crossing_NL * link_L).max(axis=1)
        squares = self.weight_N @ (predicted_N / self.ms_N - 1) ** 2
        return _Fit(prices_P, link_L, float(np.sqrt(squares / self.weight_N.sum())))

    def fitted(self, link_L: np.ndarray) -> _Fit:
        """Returns the best fit found from these prices of links.

        The prices decide which link a sample waits for, and these links decide the prices, so both are found in turn. A
        link that no sample waits for gets the price of equal links, at most the price at which a sample would wait for
        it.
        """
        prices, links = self.work_NP.shape[1], len(link_L)
        pull = np.repeat([PULL_BETWEEN_HOSTS, PULL_ALIKE], [prices, links])
        best, seen = _Fit(self.prior[:prices], link_L, np.inf), set[bytes]()
        while len(seen) < MOST_PASSES:
            slowest_N = (self.crossing_NL * link_L).argmax(axis=1)
            if slowest_N.tobytes() in seen:
                break
            seen.add(slowest_N.tobytes())
            waited_NL = np.where(slowest_N[:, None] == np.arange(links), self.crossing_NL, 0.0)
            columns = np.concatenate([self.work_NP, waited_NL], axis=1)
            found = fit_nonnegative(columns, self.ms_N, self.weight_N, self.prior, pull)
            link_L = found[prices:]
            waited_N1 = (waited_NL @ link_L)[:, None]
            most_L = (waited_N1 / np.maximum(self.crossing_NL, 1e-12)).min(axis=0)
            link_L = np.where(waited_NL.any(axis=0), link_L, np.minimum(link_L, most_L))
            best = min(best, self.priced(found[:prices], link_L), key=lambda fit: fit.error)
        return best


def _mb_per_dim(batch_size: int, world_size: int) -> float:
    """Returns the MB that a rank sends to each other rank per dim that it owns."""
    return batch_size / world_size * BYTES_PER_VALUE * 1e-6


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])
