"""A parquet file's columns as arrays: labels, dense features, and a bag of ids a row and table.

rows = read_row_group(RowGroup("day_0.parquet", number=3, rows=65536), config.data)
rows.take(np.array([5, 17]))              # DataError names file, row group and column where something is wrong
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlrm_autoshard.config_data import ParquetData, ParquetTable
from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.data.hashing import mix64

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class RowGroup:
    path: str
    number: int
    rows: int


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
    """Some row groups, decoded. labels, loss_weights: [R, L]."""

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
    """What pyarrow says of a file in here becomes a DataError that names it."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        said = str(error).strip().partition("\n")[0][:300]
        raise DataError(f"'{what}' cannot be read as parquet: {said}") from error


def check_columns(path: str, schema: pa.Schema, data: ParquetData) -> None:
    import pyarrow.types as kinds

    def number(kind: pa.DataType) -> bool:
        return bool(kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind))

    def ids(kind: pa.DataType) -> bool:
        inner = kind.value_type if kinds.is_list(kind) or kinds.is_large_list(kind) else kind
        inner = inner.value_type if kinds.is_dictionary(inner) else inner
        return bool(kinds.is_integer(inner) or kinds.is_string(inner) or kinds.is_large_string(inner))

    def numbers(kind: pa.DataType) -> bool:
        return bool((kinds.is_list(kind) or kinds.is_large_list(kind)) and number(kind.value_type)) or number(kind)

    plain = [*data.labels, *data.dense, *([data.sample_weight] if data.sample_weight is not None else [])]
    wanted = [(name, number, "numbers") for name in plain]
    wanted += [(table.column, ids, "whole numbers or text, or lists of them") for table in data.tables]
    wanted += [(table.weights, numbers, "numbers, or lists of them") for table in data.tables if table.weights]
    for name, fits, words in wanted:
        if name not in schema.names:
            near = difflib.get_close_matches(name, schema.names, n=1)
            raise DataError(f"'{path}' has no column '{name}'." + (f" Did you mean '{near[0]}'?" if near else ""))
        if not fits(schema.field(name).type):
            raise DataError(f"'{path}': column '{name}' holds {schema.field(name).type}; it must hold {words}.")


def read_row_group(group: RowGroup, data: ParquetData) -> Rows:
    import pyarrow.parquet as pq

    weights = [table.weights for table in data.tables if table.weights is not None]
    columns = {*data.labels, *data.dense, *(table.column for table in data.tables), *weights}
    columns |= {data.sample_weight} if data.sample_weight is not None else set()
    where = f"{group.path}, row group {group.number}"
    with naming(where):
        read = pq.ParquetFile(group.path).read_row_group(group.number, sorted(columns), use_threads=False)
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
            _stacked([_numbers(arrays[name]) for name in data.dense], group.rows),
            labels,
            loss_weights,
            tuple(_bags(where, arrays, table) for table in data.tables),
        )


def _stacked(columns: Sequence[NDArray[np.float32]], rows: int) -> NDArray[np.float32]:
    """[R, columns], of which there may be none."""
    return np.stack(columns, 1) if columns else np.zeros((rows, 0), np.float32)


def _numbers(array: pa.Array) -> NDArray[np.float32]:
    import pyarrow as pa

    found: NDArray[np.float32] = array.cast(pa.float32(), safe=False).fill_null(0).to_numpy(zero_copy_only=False)
    return found


def _without_nulls(where: str, column: str, array: pa.Array) -> NDArray[np.float32]:
    """A missing label is not "no click", nor a missing weight 0: who knows what they are must say so."""
    if array.null_count:
        row = int(array.is_null().to_numpy(zero_copy_only=False).argmax())
        raise DataError(
            f"'{where}', row {row}: '{column}' is null, as in {array.null_count} of {len(array)} rows. Leave such rows "
            "out, or fill in what they should have."
        )
    return _numbers(array)


def _flat(where: str, column: str, array: pa.Array) -> tuple[NDArray[np.int32], pa.Array]:
    """Lengths of bags, and what is in them."""
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    if kinds.is_list(array.type) or kinds.is_large_list(array.type):
        lengths, inner = pc.list_value_length(array).fill_null(0), array.flatten()
    else:
        lengths, inner = array.is_valid(), array.drop_null()
    if inner.null_count:
        raise DataError(f"'{where}': column '{column}' has a null in a list. Leave it out of the list.")
    return lengths.to_numpy(zero_copy_only=False).astype(np.int32), inner


def _bags(where: str, arrays: dict[str, pa.Array], table: ParquetTable) -> Bags:
    import pyarrow.types as kinds

    lengths_R, ids = _flat(where, table.column, arrays[table.column])
    rows = np.uint64(table.num_embeddings)
    if kinds.is_dictionary(ids.type):
        ids = ids.dictionary_decode()
    if not kinds.is_integer(ids.type):
        encoded = ids.dictionary_encode()
        hashes = [xxhash.xxh3_64_intdigest(word.encode()) for word in encoded.dictionary.to_pylist()]
        rows_of_words = (np.array(hashes, np.uint64) % rows).astype(np.int64)
        numbers_N = rows_of_words[encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)]
    else:
        numbers_N = ids.to_numpy(zero_copy_only=False).astype(np.int64)
        if table.hash:
            numbers_N = (mix64(numbers_N.astype(np.uint64)) % rows).astype(np.int64)
    weights_N = None
    if table.weights is not None:
        lengths, weights = _flat(where, table.weights, arrays[table.weights])
        if not np.array_equal(lengths, lengths_R):
            raise DataError(f"'{where}': '{table.weights}' has other lengths than '{table.column}'.")
        weights_N = _numbers(weights)
    return Bags(lengths_R, numbers_N, weights_N)
