"""Simulated machines with other laws than CostOracle's, which the planner knows from measurements alone.

oracle = LAWS["raw count"](tables, stats, batch_size=65536, devices=4, seed=0)
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from dlrm_autoshard.benchmarks.cost_oracle import CACHE_BYTES, CostOracle

# Axes: N sets of tables, T tables, W devices.


class RawCount(CostOracle):
    """Fusing n tables makes them up to 45% faster, by their number alone."""

    def compute_ms(self, inside_NT: np.ndarray) -> np.ndarray:
        count_N1 = np.maximum(inside_NT.sum(axis=1, keepdims=True), 1)
        return super().compute_ms(inside_NT) * (0.55 + 0.45 * count_N1**-0.5)


class LaunchByDim(CostOracle):
    """Each dim on a device needs a launch."""

    def compute_ms(self, inside_NT: np.ndarray) -> np.ndarray:
        of_dim_DT = self.dim_T == np.unique(self.dim_T)[:, None]
        launches_N = (inside_NT @ of_dim_DT.T > 0).sum(axis=1)
        return super().compute_ms(inside_NT) + 0.15 * launches_N[:, None]


class CacheCliff(CostOracle):
    """Rows are read from the cache if all of them fit, else all from memory."""

    def compute_ms(self, inside_NT: np.ndarray) -> np.ndarray:
        fits_N = inside_NT @ self.unique_bytes_T <= 8 * CACHE_BYTES
        return super().compute_ms(inside_NT) * np.where(fits_N, 0.6, 1.0)[:, None]


class Clusters(CostOracle):
    """Hidden groups of tables share ids: on one device they save half of the time of all but the largest."""

    @cached_property
    def _in_group_GT(self) -> np.ndarray:
        wholes = list(dict.fromkeys(table.shard.table for table in self.tables))
        groups_R = np.random.default_rng([self.seed, 4]).integers(max(2, len(wholes) // 4), size=len(wholes))
        groups_T = groups_R[[wholes.index(table.shard.table) for table in self.tables]]
        found: np.ndarray = (groups_T == np.unique(groups_T)[:, None]).astype(np.float64)
        return found

    def compute_ms(self, inside_NT: np.ndarray) -> np.ndarray:
        saved_N2 = np.zeros((len(inside_NT), 2))
        for in_T in self._in_group_GT:
            for stage, ms_T in enumerate((self.read_ms_T, self.update_ms_T)):
                own_NT = inside_NT * in_T * ms_T
                saved_N2[:, stage] += 0.5 * (own_NT.sum(axis=1) - own_NT.max(axis=1))
        return super().compute_ms(inside_NT) - saved_N2


class TwoHosts(CostOracle):
    """Half of the devices are on one host, half on another, with a link that is five times slower."""

    @property
    def hosts(self) -> tuple[int, ...]:
        return tuple(int(2 * rank >= self.devices) for rank in range(self.devices))

    def exchange_ms(self, dims_NW: np.ndarray) -> np.ndarray:
        host_W = np.array(self.hosts)
        mb = 4e-6 * self.batch_size / self.devices
        leaving_N = np.max([dims_NW[:, host_W == host].sum(axis=1) * (host_W != host).sum() for host in (0, 1)], axis=0)
        ms_N = self.latency_ms + self.sent_ms * mb * (dims_NW.max(axis=1) * (self.devices - 1) + 5 * leaving_N / 2)
        return np.stack([ms_N, 1.1 * ms_N], axis=1)


class Noisy(CostOracle):
    """Measurements differ by 20%, and report as much."""

    usual_noise = 0.2


class Outliers(CostOracle):
    """One measurement in twenty takes two to four times as long."""

    def noisy(self, exact_ms: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        factor = generator.uniform(2, 4) if generator.random() < 0.05 else 1.0
        return factor * super().noisy(exact_ms, generator)


LAWS: dict[str, type[CostOracle]] = {
    "fused": CostOracle,
    "raw count": RawCount,
    "launch by dim": LaunchByDim,
    "cache cliff": CacheCliff,
    "clusters": Clusters,
    "two hosts": TwoHosts,
    "20% noise": Noisy,
    "outliers": Outliers,
}
