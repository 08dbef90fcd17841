"""Measured shards as arrays: what the cost model is fitted to.

shards = ShardSet(samples)
shards.features_RF, shards.work_RP                 # of the R different tables that occur among the N shards
shards.sum_over_tables(shards.work_RP)             # [N, P]: each shard's sum over its tables
shards.target_NS                                   # ms measured, forward and backward
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_autoshard.planner.costs.features import network_features, work
from dlrm_autoshard.planner.costs.replay import ShardSample
from dlrm_autoshard.tables import TableConfig, TableStats


class ShardSet:
    """Measured shards as arrays. members_NM: indices of their tables, padded with the number of tables."""

    def __init__(self, samples: Sequence[ShardSample]) -> None:
        number: dict[tuple[TableConfig, TableStats, int], int] = {}
        known: dict[tuple[int, int, int], int] = {}  # by identity first: comparing statistics takes its time

        def number_of(table: TableConfig, stats: TableStats, batch_size: int) -> int:
            identity = (id(table), id(stats), batch_size)
            if identity not in known:
                known[identity] = number.setdefault((table, stats, batch_size), len(number))
            return known[identity]

        members = [
            [
                number_of(table, stats, sample.batch_size)
                for table, stats in zip(sample.tables, sample.stats, strict=True)
            ]
            for sample in samples
        ]
        tables, stats, batch_sizes = zip(*number, strict=True)
        batch_R = np.array(batch_sizes, dtype=np.float64)
        work_RP = work(tables, stats, batch_R)
        self.features_RF = network_features(tables, stats, batch_R, work_RP).astype(np.float32)
        self.work_RP = work_RP.astype(np.float32)
        target_NS = np.array([(s.fwd_compute_ms, s.bwd_compute_ms) for s in samples], dtype=np.float32)
        self.target_NS = np.maximum(target_NS, 1e-6)
        self.log_target_NS = np.log(self.target_NS)
        width = max(len(row) for row in members)
        self.members_NM = np.array([row + [len(number)] * (width - len(row)) for row in members])

    def sum_over_tables(self, values_RK: np.ndarray) -> np.ndarray:
        """Returns [N, K]: each shard's sum over its tables."""
        padded = np.concatenate([values_RK, np.zeros_like(values_RK[:1])])
        summed = np.zeros((len(self.members_NM), values_RK.shape[1]), dtype=values_RK.dtype)
        for column_N in self.members_NM.T:
            summed += padded[column_N]
        return summed

    def batch(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tables that occur in the chosen shards, and [N, R], 1 where a shard has a table."""
        members_NM = self.members_NM[chosen]
        inside_NR = np.zeros((len(chosen), len(self.features_RF) + 1), dtype=np.float32)
        inside_NR[np.arange(len(chosen))[:, None], members_NM] = 1.0
        occurs = np.zeros(inside_NR.shape[1], dtype=bool)
        occurs[members_NM] = True
        occurs[-1] = False  # padding
        tables = np.flatnonzero(occurs)
        return tables, inside_NR[:, tables]
