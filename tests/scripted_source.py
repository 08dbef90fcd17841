"""A data source with ids that the test knows, for the loader's tests.

source = Scripted(rows=100, ids={25: 100})      # sample 25 has id 100, which its table has no row for
"""

from __future__ import annotations

import torch

from dlrm_autoshard.data.batch import Batch, Split
from dlrm_autoshard.tables import TableConfig


class Scripted:
    """A source of one table with one id a sample: the sample's position, or what `ids` says instead."""

    num_dense = 1
    reuse_batches: int | None = None

    def __init__(self, rows: int = 1000, ids: dict[int, int] | None = None, num_samples: int = 100) -> None:
        self.tables: tuple[TableConfig, ...] = (TableConfig("other", 10, 4), TableConfig("user", rows, 4))
        self.ids = ids or {}
        self.total = num_samples
        self.dtype = torch.int64
        self.num_weights: int | None = None  # of each batch, however many ids it has
        self.reads: list[tuple[int, int]] = []

    def num_samples(self, split: Split) -> int:
        return self.total

    def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
        self.reads.append((first, last))
        size = last - first
        return Batch(
            dense_BF=torch.zeros(size, 1),
            lengths_TB=torch.stack([torch.zeros(size, dtype=torch.int32), torch.ones(size, dtype=torch.int32)]),
            values_N=torch.tensor([self.ids.get(i, i) for i in range(first, last)], dtype=self.dtype),
            labels_B=torch.zeros(size),
            size=size,
            global_size=size,
            weights_N=None if self.num_weights is None else torch.ones(self.num_weights),
        )
