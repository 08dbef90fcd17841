"""Measured shards as arrays: what the cost model is fitted to.

shards = ShardSet(samples)
shards.features_RF, shards.work_RP                 # of the R different tables that occur among the N shards
shards.sum_over_tables(shards.work_RP)             # [N, P]: each shard's sum over its tables
shards.target_NS                                   # ms measured, forward and backward
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_autoshard.planner.features import network_features, work
from dlrm_autoshard.planner.replay import ShardSample
from dlrm_autoshard.tables import TableConfig, TableStats


class ShardSet:
    """`members_NM`: index lists into the different tables, padded with the number of tables."""

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
        self.features_RF = torch.as_tensor(network_features(tables, stats, batch_R), dtype=torch.float32)
        self.work_RP = torch.as_tensor(work(tables, stats, batch_R), dtype=torch.float32)
        self.target_NS = torch.tensor(
            [(s.fwd_compute_ms, s.bwd_compute_ms) for s in samples], dtype=torch.float32
        ).clamp(min=1e-6)
        self.padding = len(number)
        width = max(len(row) for row in members)
        self.members_NM = torch.tensor([row + [self.padding] * (width - len(row)) for row in members])

    def sum_over_tables(self, values_RK: Tensor) -> Tensor:
        """[N, K]: each shard's sum over its tables."""
        padded = torch.cat([values_RK, values_RK.new_zeros(1, values_RK.shape[1])])
        return nn.functional.embedding_bag(self.members_NM, padded, mode="sum")
