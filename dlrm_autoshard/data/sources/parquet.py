"""Reads parquet files by row groups, of which few are in memory at a time, however large the files are.

    data: {source: parquet, train: ["day_*.parquet"], labels: {click: 1}, tables: [{column: user, num_embeddings: 9}]}

The order of an epoch depends on seed and epoch alone, so reading resumes in mid-epoch on any number of ranks without
saved state. Each rank decodes all row groups, as its samples may be anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import ParquetData
from dlrm_autoshard.data.batch import SPLITS, Batch, DataError, Split
from dlrm_autoshard.data.hashing import key_of, permutation
from dlrm_autoshard.data.resolve_tables import TableRows, resolve_tables
from dlrm_autoshard.data.sources.parquet_columns import RowGroup, Rows, open_file, read_row_group
from dlrm_autoshard.data.sources.parquet_files import check_trained_on_once, parquet_files
from dlrm_autoshard.data.sources.parquet_types import kind_of_ids


class ParquetSource:
    """Samples of parquet files, with a table per column of `tables`: whole numbers or text, or lists of them.

    Text is hashed. A null is an empty bag, 0 as a dense feature, and an error as a label or sample weight.
    `label_names` has a name per task; one label is [B], several are [B, L]. labelled: False reads neither labels nor
    sample weights, which the files may lack; labels are NaN, and train's rows keep the files' order. splits: whose
    files are opened; others have no samples. hashed: `hash` of each column of `tables`, completed by the files'
    types."""

    reuse_batches: int | None = None

    def __init__(
        self, data: ParquetData, tables: TablesConfig, *, labelled: bool = True, splits: Sequence[Split] = SPLITS
    ) -> None:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise DataError("data.source 'parquet' needs pyarrow. Install it with: pip install pyarrow") from error
        self.id_weights = any(table.weights for table in data.tables)
        self.num_dense, self.dense_names = len(data.dense), tuple(data.dense)
        self.label_names = tuple(data.labels)
        self.tables = resolve_tables([TableRows(table.column, table.num_embeddings) for table in data.tables], tables)
        averaged = next((table.name for table in self.tables if table.pooling == "mean"), None)
        if averaged is not None and self.id_weights:
            raise DataError(f"data.tables: ids with weights are summed, but the pooling of '{averaged}' is mean.")
        self._labelled = labelled
        if not labelled:
            data = data.model_copy(update={"labels": {}, "sample_weight": None, "shuffle": False})
        names: dict[Split, list[str]] = {"train": data.train, "val": data.val, "test": data.test}
        paths = {split: parquet_files(names[split], f"data.{split}") if split in splits else [] for split in SPLITS}
        check_trained_on_once(paths)
        self._groups = {
            split: tuple(group for path in of_split for group in open_file(path, data))
            for split, of_split in paths.items()
        }
        self._data = _settled(data, self._groups)
        self.hashed = {table.column: table.hash for table in self._data.tables}
        self.remarks = [
            f"column '{column}' is in data.dense and in data.tables: the model also sees its ids as amounts."
            for column in data.dense
            if column in self.hashed
        ]
        self.num_files = {split: len(of_split) for split, of_split in paths.items()}
        self._decoded = lru_cache(maxsize=2)(self._decode)  # a batch may span two windows
        self._order = lru_cache(maxsize=2)(permutation)

    def num_samples(self, split: Split) -> int:
        return sum(group.rows for group in self._groups[split])

    def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
        parts = [
            self._decoded(groups).take(order_R[max(0, first - start) : last - start])
            for start, groups, order_R in self._windows(split, epoch, first, last)
        ]
        rows = Rows.joined(parts) if parts else self._decoded(self._groups[split][:1]).take(np.zeros(0, np.int64))
        weights_T = [
            bags.weights if bags.weights is not None else np.ones(len(bags.ids), np.float32) for bags in rows.bags_T
        ]
        labels = rows.labels
        if not self._labelled:
            labels = np.full((last - first, len(self.label_names)), np.nan, np.float32)
        one_label = len(self.label_names) == 1
        plain = self._data.sample_weight is None and set(self._data.labels.values()) <= {1}
        return Batch(
            dense_BF=torch.from_numpy(rows.dense),
            lengths_TB=torch.from_numpy(np.stack([bags.lengths_R for bags in rows.bags_T])),
            values_N=torch.from_numpy(np.concatenate([bags.ids for bags in rows.bags_T])),
            labels_B=torch.from_numpy(labels[:, 0] if one_label else labels),
            size=last - first,
            global_size=last - first,
            weights_N=torch.from_numpy(np.concatenate(weights_T)) if self.id_weights else None,
            loss_weights_B=(
                None if plain else torch.from_numpy(rows.loss_weights[:, 0] if one_label else rows.loss_weights)
            ),
        )

    def place(self, split: Split, epoch: int, sample: int) -> str:
        """Returns where the sample is, for messages."""
        for start, groups, order_R in self._windows(split, epoch, sample, sample + 1):
            row = int(order_R[sample - start])
            for group in groups:
                if row < group.rows:
                    return f"row {row} (from 0) of '{group.path}', row group {group.number}"
                row -= group.rows
        raise IndexError(f"split '{split}' has no sample {sample}")

    def _windows(
        self, split: Split, epoch: int, first: int, last: int
    ) -> Iterator[tuple[int, tuple[RowGroup, ...], NDArray[np.int64]]]:
        """Yields the windows that overlap [first, last): their first sample, row groups, and the order of their
        rows."""
        groups, size, start = self._groups[split], 1, 0
        shuffled = self._data.shuffle and split == "train"
        if shuffled:
            order = permutation(key_of(self._data.seed, "row groups", epoch), len(groups))
            groups, size = tuple(groups[number] for number in order), self._data.shuffle_row_groups
        for number in range(0, len(groups), size):
            window = groups[number : number + size]
            rows = sum(group.rows for group in window)
            if start < last and first < start + rows:
                key = key_of(self._data.seed, "rows", epoch, number)
                yield start, window, self._order(key, rows) if shuffled else np.arange(rows)
            start += rows

    def _decode(self, groups: tuple[RowGroup, ...]) -> Rows:
        return Rows.joined([read_row_group(group, self._data) for group in groups])


def _settled(data: ParquetData, groups: Mapping[Split, Sequence[RowGroup]]) -> ParquetData:
    """Completes `hash` of each table by the type in the first file with ids. DataError names a text file of a column
    whose whole numbers are rows: "7" would be another row than 7."""
    tables = []
    for table in data.tables:
        of_files = {group.path: group.type_of(table.column) for split in SPLITS for group in groups[split]}
        said, first = table.hash, ""
        for path, kind in of_files.items():
            found = kind_of_ids(kind)
            if found == "text" and said is False:
                raise DataError(
                    f"'{path}': column '{table.column}' holds {kind}, but its ids are used as rows{first}. Store whole "
                    "numbers there, too, or train with hash: true in data.tables, by which 7 and '7' are the same."
                )
            if said is None and found != "nothing":
                said, first = found == "text", f", as '{path}' holds {kind}"
        tables.append(table.model_copy(update={"hash": said}))
    return data.model_copy(update={"tables": tables})
