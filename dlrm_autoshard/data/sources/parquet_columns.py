"""Reads a parquet file's columns as arrays: labels, dense features, and a bag of ids per row and table.

rows = read_row_group(open_file("day_0.parquet", config.data)[3], config.data)
rows.take(np.array([5, 17]))              # DataError names file, row group and column
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dlrm_autoshard.config_data import ParquetData, ParquetTable
from dlrm_autoshard.data.errors import BadValue, DataError
from dlrm_autoshard.data.id_check import OnBadId, signed
from dlrm_autoshard.data.sources.parquet_types import (
    hashed,
    is_number,
    is_number_or_list,
    kind_of_ids,
    lengths_of,
    nan_as_null,
    numbers,
    values_of,
    whole_numbers,
)
from dlrm_autoshard.formats.words import some_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file. types: of the columns to read, by name, as they were when the file was opened."""

    path: str
    number: int
    rows: int
    types: tuple[tuple[str, pa.DataType], ...]

    def type_of(self, column: str) -> pa.DataType:
        return dict(self.types)[column]


@dataclass(frozen=True)
class Bags:
    """One table's ids: row r has ids[ends[r] - lengths[r] : ends[r]]."""

    lengths_R: NDArray[np.int32]
    ids: NDArray[np.int64]
    weights: NDArray[np.float32] | None

    def take(self, rows_B: NDArray[np.int64]) -> Bags:
        lengths_B = self.lengths_R[rows_B]
        shifts_B = self.lengths_R.cumsum(dtype=np.int64)[rows_B] - lengths_B.cumsum(dtype=np.int64)
        places_N = np.repeat(shifts_B, lengths_B) + np.arange(lengths_B.sum())
        return Bags(lengths_B, self.ids[places_N], None if self.weights is None else self.weights[places_N])


@dataclass(frozen=True)
class Rows:
    """Decoded row groups. labels, loss_weights: [R, L]."""

    dense: NDArray[np.float32]
    labels: NDArray[np.float32]
    loss_weights: NDArray[np.float32]
    bags_T: tuple[Bags, ...]

    def take(self, rows_B: NDArray[np.int64]) -> Rows:
        bags_T = tuple(bags.take(rows_B) for bags in self.bags_T)
        return Rows(self.dense[rows_B], self.labels[rows_B], self.loss_weights[rows_B], bags_T)

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        def join(name: str) -> NDArray[Any]:
            return np.concatenate([getattr(part, name) for part in parts])

        bags_T = tuple(
            Bags(
                np.concatenate([bags.lengths_R for bags in table]),
                np.concatenate([bags.ids for bags in table]),
                None if table[0].weights is None else np.concatenate([bags.weights for bags in table]),
            )
            for table in zip(*(part.bags_T for part in parts), strict=True)
        )
        return Rows(join("dense"), join("labels"), join("loss_weights"), bags_T)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turns pyarrow's errors about a file into a DataError that names it."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        said = str(error).strip().partition("\n")[0][:300]
        raise DataError(f"'{what}' cannot be read as parquet: {said}") from error


def open_file(path: str, data: ParquetData) -> tuple[RowGroup, ...]:
    """Returns the file's non-empty row groups. DataError if a column is missing or has an unusable type."""
    import pyarrow.parquet as pq

    with naming(path):
        file = pq.ParquetFile(path)
        _check_columns(path, file.schema_arrow, data)
        types = tuple((name, file.schema_arrow.field(name).type) for name in _columns(data))
        counts = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    return tuple(RowGroup(path, number, rows, types) for number, rows in enumerate(counts) if rows)


def _check_columns(path: str, schema: pa.Schema, data: ParquetData) -> None:
    plain = [*data.labels, *data.dense, *([data.sample_weight] if data.sample_weight is not None else [])]
    weights = [table.weights for table in data.tables if table.weights is not None]
    wanted: list[tuple[str, Callable[[pa.DataType], object], str]] = [(name, is_number, "numbers") for name in plain]
    wanted += [(table.column, kind_of_ids, "whole numbers or text, or lists of them") for table in data.tables]
    wanted += [(name, is_number_or_list, "numbers, or lists of them") for name in weights]
    missing = [name for name, _, _ in wanted if name not in schema.names]
    if missing:
        near = difflib.get_close_matches(missing[0], schema.names, n=1) if len(missing) == 1 else []
        guess = f" Did you mean '{near[0]}'?" if near else ""
        raise DataError(
            f"'{path}' has no column{'s' * (len(missing) > 1)} {some_of(missing, 8)}.{guess} It has "
            f"{some_of(schema.names, 20)}."
        )
    for name, fits, words in wanted:
        times = schema.names.count(name)
        if times > 1:
            raise DataError(f"'{path}' has {times} columns named '{name}'. Write it again with each name once.")
        if not fits(kind := schema.field(name).type):
            raise DataError(
                f"'{path}': column '{name}' holds {kind}; it must hold {words}. Write it again with the column cast to "
                "one of these."
            )


def _columns(data: ParquetData) -> list[str]:
    """Returns the names of the columns to read."""
    weights = [table.weights for table in data.tables if table.weights is not None]
    weights += [data.sample_weight] if data.sample_weight is not None else []
    return sorted({*data.labels, *data.dense, *(table.column for table in data.tables), *weights})


def _check_unchanged(group: RowGroup, file: pq.ParquetFile) -> None:
    """Raises DataError if the file has changed since it was opened."""
    schema = file.schema_arrow
    for name, before in group.types:
        now = schema.field(name).type if schema.names.count(name) == 1 else None
        if now != before:
            what = f"column '{name}' held {before} then, and " + ("is not there now" if now is None else f"{now} now")
            break
    else:
        rows = file.metadata.row_group(group.number).num_rows if group.number < file.num_row_groups else 0
        if rows == group.rows:
            return
        what = f"row group {group.number} had {group.rows:,} rows then, and has {rows:,} now"
    raise DataError(
        f"'{group.path}' has been replaced since this job opened it: {what}. Put the file back and continue "
        "(--resume), or start anew with the files as they are."
    )


def read_row_group(group: RowGroup, data: ParquetData) -> Rows:
    """Reads the config's columns from one row group."""
    import pyarrow.parquet as pq

    where = f"{group.path}, row group {group.number}"
    with naming(where):
        file = pq.ParquetFile(group.path)
        _check_unchanged(group, file)
        columns = [name for name, _ in group.types]
        read = file.read_row_group(group.number, columns, use_threads=False)
        if read.num_rows != group.rows:
            raise DataError(f"'{where}' has {read.num_rows} rows where the file's footer says {group.rows}.")
        arrays = {name: read.column(name).combine_chunks() for name in columns}
        labels = _stacked([_without_nulls(where, name, arrays[name]) for name in data.labels], group.rows)
        for place, task in enumerate(data.labels):
            bad = ~np.isin(labels[:, place], (0, 1))
            if bad.any():
                row = int(bad.argmax())
                raise DataError(f"'{where}', row {row}: label '{task}' is {labels[row, place]:g}; it must be 0 or 1.")
        loss_weights = np.repeat(np.array([list(data.labels.values())], np.float32), len(labels), 0)
        if data.sample_weight is not None:
            loss_weights *= _without_nulls(where, data.sample_weight, arrays[data.sample_weight])[:, None]
            if not (np.isfinite(loss_weights) & (loss_weights >= 0)).all():
                raise DataError(f"'{where}': '{data.sample_weight}' holds a weight that is negative or not finite.")
        return Rows(
            _stacked([numbers(arrays[name]) for name in data.dense], group.rows),
            labels,
            loss_weights,
            tuple(_bags(where, arrays, table, data.on_bad_id) for table in data.tables),
        )


def _stacked(columns: Sequence[NDArray[np.float32]], rows: int) -> NDArray[np.float32]:
    """Returns [R, columns], also for no columns."""
    return np.stack(columns, 1) if columns else np.zeros((rows, 0), np.float32)


def _without_nulls(where: str, column: str, array: pa.Array) -> NDArray[np.float32]:
    """Converts a column; DataError for nulls: a missing label is not "no click", nor a missing weight 0."""
    if array.null_count:
        row = int(array.is_null().to_numpy(zero_copy_only=False).argmax())
        raise DataError(
            f"'{where}', row {row}: '{column}' is null, as in {array.null_count} of {len(array)} rows. Leave such rows "
            "out, or fill in values."
        )
    return numbers(array)


@contextmanager
def _naming_value(where: str, column: str, array: pa.Array) -> Iterator[None]:
    """Turns a column's BadValue into a DataError that names its row."""
    try:
        yield
    except BadValue as bad:
        row = int(np.searchsorted(lengths_of(array).cumsum(dtype=np.int64), bad.place, side="right"))
        raise DataError(f"'{where}', row {row}: '{column}' is {bad}.") from bad


def _bags(where: str, arrays: dict[str, pa.Array], table: ParquetTable, on_bad_id: OnBadId) -> Bags:
    column = nan_as_null(arrays[table.column])
    lengths_R = lengths_of(column)
    with _naming_value(where, table.column, column):
        ids, rows = values_of(column), table.num_embeddings
        if table.hash:
            ids_N = hashed(ids, rows)
        else:
            ids_N = signed(whole_numbers(ids), rows, on_bad_id).astype(np.int64, copy=False)
    if table.weights is None:
        return Bags(lengths_R, ids_N, None)
    weights = arrays[table.weights]
    if not np.array_equal(lengths_of(weights), lengths_R):
        raise DataError(f"'{where}': '{table.weights}' has other lengths than '{table.column}'.")
    with _naming_value(where, table.weights, weights):
        return Bags(lengths_R, ids_N, numbers(values_of(weights)))
