"""Fills tables with initial rows: from a file, or random, where each element is a hash of table, row and column.

    initialise(weight, "user", seed=0)            # uniform in +-1/sqrt(rows); same bits on any device, under any plan
    start(weight, shard, seed=0)                  # the same, unless the table's `init` names a file or another range

The hash is Wellons' `lowbias32` (nullprogram.com, 2018), in 32-bit integers that wrap around.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm_autoshard.errors import UserError, in_a_sentence
from dlrm_autoshard.tables import TableConfig, TableInit

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
_COLUMN_STEP = 0x9E3779B9 - (1 << 32)  # 2^32 over the golden ratio: neighbours' inputs differ in many bits
_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 26}  # per pass: fits a core's cache; fills a GPU


def start(weight: Tensor, shard: TableConfig, seed: int, rows: int | None = None) -> None:
    """Fills a shard with its initial rows. rows: of the whole table; None: the shard has all."""
    if shard.init is not None and shard.init.file is not None:
        read_into(weight, shard)
    else:
        initialise(weight, shard.shard.table, seed, shard.columns[0], shard.rows[0], rows, shard.init)


def initialise(
    weight: Tensor,
    table: str,
    seed: int,
    first_column: int = 0,
    first_row: int = 0,
    rows: int | None = None,
    init: TableInit | None = None,
) -> None:
    """Fills `weight` [rows, columns], which starts at `first_row` and `first_column` of the table, with random values.
    rows: of the whole table; None: all are in `weight`. init: None: uniform in +-1/sqrt(rows)."""
    digest = hashlib.sha256(f"{seed}/{table}".encode()).digest()
    row_key, column_key = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
    own_rows, columns = weight.shape
    rows = rows or own_rows
    columns_D = torch.arange(first_column, first_column + columns, dtype=torch.int32, device=weight.device)
    columns_D = columns_D.mul_(_COLUMN_STEP) ^ column_key
    at_a_time = max(1, _ELEMENTS.get(weight.device.type, 1 << 16) // columns)
    for first in range(0, own_rows, at_a_time):
        stop = min(own_rows, first + at_a_time)
        rows_R = torch.arange(first_row + first, first_row + stop, dtype=torch.int32, device=weight.device) ^ row_key
        hashed = _hash(_hash(rows_R)[:, None] ^ columns_D)
        # 24 bits are exact in float32; only the last product rounds.
        uniform = hashed.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32)
        centred = uniform.mul_(2.0**-24).sub_(0.5)
        if init is not None and init.normal is not None:  # the normal quantile; at -1 it is infinite
            weight[first:stop].copy_(centred.mul_(2.0).clamp_(min=2.0**-23 - 1.0).erfinv_().mul_(2**0.5 * init.normal))
        else:
            bound = rows**-0.5 if init is None or init.uniform is None else init.uniform
            weight[first:stop].copy_(centred.mul_(2.0 * bound))


def _hash(x: Tensor) -> Tensor:
    """Hashes 32-bit integers in place."""
    for shift, factor in ((16, _FIRST), (15, _SECOND), (16, 1)):
        x ^= (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)  # >> would copy the sign down
        if factor != 1:
            x *= factor
    return x


_AT_A_TIME = 1 << 20
"""Elements to read at once."""


def check_file(table: TableConfig) -> None:
    """Raises UserError if the file of a table's initial rows cannot be read, or has another shape."""
    if table.init is None or table.init.file is None:
        return
    path = Path(table.init.file)
    try:
        shape = _shape(path)
    except (OSError, ValueError, ImportError) as error:
        raise _unreadable(table.name, path, error) from error
    if shape != (table.num_embeddings, table.embedding_dim):
        said = " x ".join(f"{size:,}" for size in shape)
        raise UserError(
            f"'{path}' has {said} numbers, but table '{table.name}', which starts from it, has "
            f"{table.num_embeddings:,} rows of {table.embedding_dim}. Give a file of that shape, or change the table's."
        )


def read_into(weight: Tensor, shard: TableConfig) -> None:
    """Fills a shard's weights from its table's file, a few rows at a time."""
    assert shard.init is not None and shard.init.file is not None
    path, (first, last), (start, stop) = Path(shard.init.file), shard.rows, shard.columns
    blocks = _parquet(path, start, stop) if path.suffix == ".parquet" else _npy(path, first, last, start, stop)
    try:
        for row, values in blocks:
            begin, end = max(row, first), min(row + len(values), last)
            if begin < end:
                weight[begin - first : end - first].copy_(torch.from_numpy(values[begin - row : end - row]))
    except (OSError, ValueError) as error:
        raise _unreadable(shard.name, path, error) from error


def _unreadable(table: str, path: Path, error: Exception) -> UserError:
    said = in_a_sentence(error) or str(error)
    return UserError(f"the initial rows of table '{table}' cannot be read from '{path}': {said}")


def _shape(path: Path) -> tuple[int, ...]:
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not np.issubdtype(array.dtype, np.floating):
            raise ValueError(f"it holds {array.dtype}; it must hold float16, float32 or float64.")
        return tuple(array.shape)
    if path.suffix != ".parquet":
        raise ValueError("its name must end in .npy or .parquet.")
    file = _open(path)
    columns = file.schema_arrow
    if len(columns) == 1 and file.metadata.num_rows:
        first = next(file.iter_batches(batch_size=1)).column(0)[0].as_py()
        return file.metadata.num_rows, len(first) if isinstance(first, list) else 1
    return file.metadata.num_rows, len(columns)


def _npy(path: Path, first: int, last: int, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first row, values), some rows at a time. Maps the file, so that only these are read."""
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    step = max(1, _AT_A_TIME // array.shape[1])
    for row in range(first, last, step):
        yield row, np.array(array[row : min(last, row + step), start:stop], dtype=np.float32)


def _parquet(path: Path, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
    file, row = _open(path), 0
    names = file.schema_arrow.names
    lists = len(names) == 1
    step = max(1, _AT_A_TIME // max(1, stop - start))
    for batch in file.iter_batches(batch_size=step, columns=None if lists else names[start:stop]):
        if lists:
            rows = batch.column(0)
            flat = rows.flatten().to_numpy(zero_copy_only=False)
            if len(flat) % len(rows) or (rows.value_lengths().to_numpy() != len(flat) // len(rows)).any():
                raise ValueError(f"its lists are not all as long as the first (rows {row:,} and up).")
            values = flat.reshape(len(rows), -1)[:, start:stop]
        else:
            values = np.stack([column.to_numpy(zero_copy_only=False) for column in batch.columns], 1)
        yield row, np.array(values, dtype=np.float32)
        row += len(values)


def _open(path: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path)
