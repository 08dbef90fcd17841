"""Reads Criteo's click logs in the npy layout of MLPerf and TorchRec, mapped, so that memory holds only a batch.

<dir>/day_0_dense.npy [n, 13], day_0_sparse.npy [n, 26], day_0_labels.npy [n, 1], day_1_dense.npy, ...
<dir>/day_0_sparse_multi_hot.npz    instead of _sparse.npy with `multi_hot`: arrays "0" to "25" [n, ids per sample]
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import TypedDict

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import CriteoData
from dlrm_autoshard.data.batch import SPLITS, Batch, DataError, Split
from dlrm_autoshard.data.errors import BadValue
from dlrm_autoshard.data.id_check import signed
from dlrm_autoshard.data.resolve_tables import TableRows, resolve_tables
from dlrm_autoshard.data.sources.criteo.npy_files import map_npy, map_npz
from dlrm_autoshard.data.sources.criteo.preprocess import TABLES_FILE
from dlrm_autoshard.data.sources.criteo.text import NUM_CATEGORIES, NUM_INTEGERS
from dlrm_autoshard.formats.json_file import read_json
from dlrm_autoshard.formats.numbers import Positive

_DAYS_OF_A_SINGLE_FILE = 7
_SMALL_ROWS = 1000  # row_scale leaves smaller tables alone: it would save nothing and merge meanings
_ROWS_AT_A_TIME = 1 << 18


@dataclass(frozen=True)
class _Day:
    """A day's arrays. ids_T: [n, ids per sample] for each table. files: a pattern that matches them, for messages."""

    dense: NDArray[np.floating]
    ids_T: Sequence[NDArray[np.integer]]
    labels: NDArray[np.integer]
    files: str

    def __len__(self) -> int:
        return len(self.labels)


_Piece = tuple[_Day, int, int]
"""A day with the first and the end position of a part of it."""


class _Recorded(TypedDict):
    num_embeddings: list[Positive]


class CriteoSource:
    """Criteo's days, read in the order of the log, as is usual.

    Rows of a table come from the first of: `num_embeddings` in the config; tables.json of our preprocessing; the
    largest id of the column, found in a pass over all days. "train" is all days but the held-out ones (the last, unless
    the config names others), whose first half is "val" and second half "test". A single day counts as seven (Kaggle's
    train.txt is a week): six sevenths to train on, the rest halved. With `train_days: []` everything is "test": days
    after training.
    """

    num_dense = NUM_INTEGERS
    dense_names = tuple(f"I{number}" for number in range(1, NUM_INTEGERS + 1))
    reuse_batches: int | None = None
    parallel_reads = True

    def __init__(self, data: CriteoData, tables: TablesConfig, splits: Sequence[Split] = SPLITS) -> None:
        """splits: those that will be read."""
        directory = Path(data.dir)
        train_days, test_days = _choose_days(directory, data)
        days = {day: _open_day(directory, day, data.multi_hot) for day in sorted({*train_days, *test_days})}
        held_out = [(days[day], 0, len(days[day])) for day in test_days]
        self._pieces: dict[Split, list[_Piece]] = {"train": [], "val": [], "test": held_out}
        if data.train_days != []:
            self._pieces = _splits([days[day] for day in train_days], held_out)
        if "train" in splits and self.num_samples("train") == 0:
            rows = {day: len(opened) for day, opened in days.items()}
            raise DataError(
                f"data.train_days: there is nothing to train on. Days {train_days} of '{directory}' are for training, "
                f"{test_days} for testing; rows by day: {rows}. Name training days that have rows."
            )
        self._lengths_T = [ids.shape[1] for ids in next(iter(days.values())).ids_T]
        for day, opened in days.items():
            if [ids.shape[1] for ids in opened.ids_T] != self._lengths_T:
                raise DataError(f"'{directory}': day {day} has other numbers of ids per sample than day {min(days)}.")
        rows_T = data.num_embeddings or _recorded_rows(directory) or _largest_ids(days.values())
        if len(rows_T) != NUM_CATEGORIES:
            raise DataError(f"data.num_embeddings has {len(rows_T)} numbers; Criteo has {NUM_CATEGORIES} tables.")
        if data.row_scale != 1.0:
            rows_T = [rows if rows <= _SMALL_ROWS else max(_SMALL_ROWS, int(rows * data.row_scale)) for rows in rows_T]
        self._on_bad_id = data.on_bad_id
        self._modulo = bool(data.num_embeddings) or data.row_scale != 1.0
        self.tables = resolve_tables([TableRows(f"t_cat_{i}", rows) for i, rows in enumerate(rows_T)], tables)

    def num_samples(self, split: Split) -> int:
        return sum(last - first for _, first, last in self._pieces[split])

    def read(self, split: Split, epoch: int, first: int, last: int) -> Batch:
        pieces = list(_between(self._pieces[split], first, last))
        size = last - first
        values: list[NDArray[np.integer]] = [np.empty(0, np.int32)]
        for table, config in enumerate(self.tables):
            for day, start, stop in pieces:
                ids = day.ids_T[table][start:stop]
                try:
                    flat = signed(ids.reshape(-1), config.num_embeddings, "hash" if self._modulo else self._on_bad_id)
                except BadValue as bad:
                    row = start + bad.place // ids.shape[1]
                    raise DataError(
                        f"row {row} (from 0) of '{day.files}' has in table '{config.name}' id {bad}."
                    ) from bad
                values.append(_within(flat, config.num_embeddings) if self._modulo else flat)
        dense = [day.dense[start:stop] for day, start, stop in pieces]
        labels = [day.labels[start:stop].reshape(-1) for day, start, stop in pieces]
        return Batch(
            dense_BF=torch.from_numpy(_floats([np.empty((0, NUM_INTEGERS), np.float32), *dense])),
            lengths_TB=torch.tensor(self._lengths_T, dtype=torch.int32)[:, None].repeat(1, size),
            values_N=torch.from_numpy(np.concatenate(values)),
            labels_B=torch.from_numpy(_floats([np.empty(0, np.int32), *labels])),
            size=size,
            global_size=size,
        )

    def place(self, split: Split, epoch: int, sample: int) -> str:
        """Returns where the sample is, for messages."""
        day, row, _ = next(_between(self._pieces[split], sample, sample + 1))
        return f"row {row} (from 0) of '{day.files}'"


def _between(pieces: Sequence[_Piece], first: int, last: int) -> Iterator[_Piece]:
    """Yields the parts of consecutive pieces that hold positions [first, last)."""
    for day, start, stop in pieces:
        low, high = max(first, 0), min(last, stop - start)
        if low < high:
            yield day, start + low, start + high
        first, last = first - (stop - start), last - (stop - start)


def _choose_days(directory: Path, data: CriteoData) -> tuple[list[int], list[int]]:
    present = sorted(_day_of(path) for path in directory.glob("day_*_labels.npy"))
    if not present:
        raise DataError(
            f"'{directory}' has no day_*_labels.npy. Make them from Criteo's text files with `dlrm-autoshard data "
            f"criteo train.txt --out {directory}`, or try out the config on a small made-up log with "
            f"`dlrm-autoshard data criteo-sample --out {directory}`."
        )
    train_days, test_days = data.train_days, data.test_days
    if test_days is None:
        test_days = present[-1:] if train_days is None else [day for day in present if day not in train_days]
    if train_days is None:
        train_days = [day for day in present if day not in test_days]
    for key, days in (("train_days", train_days), ("test_days", test_days)):
        for number, day in enumerate(days):
            if day in days[:number]:
                raise DataError(f"data.{key} has day {day} twice. Name it once.")
            if day not in present:
                raise DataError(f"data.{key} has day {day}, but '{directory}' has only days {present}.")
    both = sorted({*train_days} & {*test_days})
    if both:
        raise DataError(
            f"data.train_days and data.test_days both have days {both}: metrics would cover samples that were trained "
            "on. Remove them from one."
        )
    return train_days, test_days


def _day_of(path: Path) -> int:
    """Returns 7 for `day_7_labels.npy`. DataError for any other name: the day's other files are named by the number,
    and no file is skipped in silence."""
    number = path.name.removeprefix("day_").removesuffix("_labels.npy")
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", number):
        raise DataError(
            f"'{path}' has no day number in its name, such as day_7_labels.npy. Rename its files, or move them."
        )
    return int(number)


def _splits(train: Sequence[_Day], held_out: list[_Piece]) -> dict[Split, list[_Piece]]:
    if train or len(held_out) != 1:
        train_pieces = [(day, 0, len(day)) for day in train]
    else:
        total = len(held_out[0][0])
        cut = total - total // _DAYS_OF_A_SINGLE_FILE
        train_pieces, held_out = list(_between(held_out, 0, cut)), list(_between(held_out, cut, total))
    num_held_out = sum(stop - start for _, start, stop in held_out)
    half = (num_held_out + 1) // 2
    return {
        "train": train_pieces,
        "val": list(_between(held_out, 0, half)),
        "test": list(_between(held_out, half, num_held_out)),
    }


def _open_day(directory: Path, day: int, multi_hot: bool) -> _Day:
    dense_path, labels_path = directory / f"day_{day}_dense.npy", directory / f"day_{day}_labels.npy"
    ids_path = directory / f"day_{day}_{'sparse_multi_hot.npz' if multi_hot else 'sparse.npy'}"
    dense, labels = map_npy(dense_path), map_npy(labels_path)
    if multi_hot:
        arrays = map_npz(ids_path)
        missing = [str(table) for table in range(NUM_CATEGORIES) if str(table) not in arrays]
        if missing:
            raise DataError(f"'{ids_path}' should hold arrays '0' to '25', but lacks {', '.join(missing)}.")
        ids_T = [arrays[str(table)] for table in range(NUM_CATEGORIES)]
    else:
        sparse = map_npy(ids_path)
        _expect_shape(ids_path, sparse, len(labels), NUM_CATEGORIES, "integer")
        ids_T = [sparse[:, table : table + 1] for table in range(NUM_CATEGORIES)]
    columns = math.prod(labels.shape[1:])  # -1 fails in a day without rows
    _expect_shape(labels_path, labels.reshape(len(labels), columns), len(labels), 1, "number")
    _expect_shape(dense_path, dense, len(labels), NUM_INTEGERS, "number")
    for ids in ids_T:
        _expect_shape(ids_path, ids, len(labels), None, "integer")
    return _Day(dense, ids_T, labels, str(directory / f"day_{day}_*"))


def _expect_shape(path: Path, array: NDArray[Any], rows: int, columns: int | None, kind: str) -> None:
    is_kind = array.dtype.kind in ("iu" if kind == "integer" else "biuf")
    fits = array.ndim == 2 and len(array) == rows and (columns is None or array.shape[1] == columns)
    if not (is_kind and fits):
        raise DataError(
            f"'{path}' holds {array.dtype} {list(array.shape)}; it should be {kind}s [{rows}, {columns or 'any'}], "
            "with as many rows as the day has labels."
        )


def _floats(parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Concatenates the parts into an array of the batch's own."""
    return np.concatenate(parts).astype(np.float32, copy=False)


def _within(ids: NDArray[np.integer], rows: int) -> NDArray[np.integer]:
    """Returns ids modulo rows. Skips the division, which is slow, if no id is out of range."""
    if ids.min(initial=0) >= 0 and ids.max(initial=0) < rows:
        return ids
    return (ids if rows <= np.iinfo(ids.dtype).max else ids.astype(np.int64)) % rows


def _recorded_rows(directory: Path) -> list[int] | None:
    path = directory / TABLES_FILE
    if not path.exists():
        return None
    return read_json(path, _Recorded, "tables of the data", extra="ignore")["num_embeddings"]


def _largest_ids(days: Iterable[_Day]) -> list[int]:
    """Returns rows by the largest id of each column, in a pass over all ids in bounded memory."""
    largest_T = np.zeros(NUM_CATEGORIES, np.int64)
    for day in days:
        for table, ids in enumerate(day.ids_T):
            for start in range(0, len(ids), _ROWS_AT_A_TIME):
                largest_T[table] = max(largest_T[table], int(ids[start : start + _ROWS_AT_A_TIME].max(initial=0)))
    return [int(largest) + 1 for largest in largest_T]
