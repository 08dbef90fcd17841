"""Assigns ids of tables that are split by rows to row shards, with ids counted from each shard's first row.

ranges = RowRanges(features, plan)
batch = ranges.split(batch)                  # a bag per sample, feature and row shard
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import Shard, TableConfig

# Axes: F features, R row ranges of features, B samples, N ids.


class RowRanges:
    """Row ranges of features under a plan. tables: for each range, its feature's table with those rows."""

    def __init__(self, features: Features, plan: ShardingPlan) -> None:
        whole = (Shard("whole"),)  # also for tables outside the plan
        rows_of = [dict.fromkeys(part.rows for part in plan.parts_of(table.name) or whole) for table in features.tables]
        self._rows_of_F = [rows_of[table] for table in features.table_of]
        numbered = [(feature, rows) for feature, own in enumerate(self._rows_of_F) for rows in own]
        self._number_of = {of: number for number, of in enumerate(numbered)}
        wholes = features.features
        self.tables: tuple[TableConfig, ...] = tuple(
            wholes[feature] if rows is None else wholes[feature].row_range(*rows) for feature, rows in numbered
        )
        self._splits = len(self.tables) > len(features.features)

    def number(self, feature: int, shard: TableConfig) -> int:
        """Returns the number of the range that the shard holds of this feature."""
        return self._number_of[feature, shard.shard.rows]

    def split(self, batch: Batch) -> Batch:
        """Returns the batch with bags per range instead of per feature: the ids in the range, in order, with
        weights."""
        if not self._splits:
            return batch
        counts = batch.lengths_TB.sum(1).tolist()
        ids_of_F = batch.values_N.split(counts)
        weights_of_F = [None] * len(counts) if batch.weights_N is None else batch.weights_N.split(counts)
        lengths: list[Tensor] = []
        values: list[Tensor] = []
        weights: list[Tensor] = []
        for feature, (ids, own_weights) in enumerate(zip(ids_of_F, weights_of_F, strict=True)):
            lengths_B, ranges = batch.lengths_TB[feature], self._rows_of_F[feature]
            ends = None if None in ranges else lengths_B.cumsum(0)
            for rows in ranges:
                if rows is None or ends is None:
                    lengths.append(lengths_B)
                    values.append(ids)
                    weights += [] if own_weights is None else [own_weights]
                    continue
                chosen = (ids >= rows[0]) & (ids < rows[1])
                within = torch.nn.functional.pad(chosen.cumsum(0), (1, 0))[ends]
                lengths.append(within.diff(prepend=within.new_zeros(1)).to(lengths_B.dtype))
                values.append(ids[chosen] - rows[0])
                weights += [] if own_weights is None else [own_weights[chosen]]
        return replace(
            batch,
            lengths_TB=torch.stack(lengths),
            values_N=torch.cat(values),
            weights_N=torch.cat(weights) if weights else batch.weights_N,
        )
