"""First values of a table from a file: an array of numpy's, or parquet. Only a shard's own rows and columns are read.

check_file(table)                       # UserError where the file does not have the table's shape
read_into(weight, shard)                # a shard of a table whose `init` names a file
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm_autoshard.errors import UserError, in_a_sentence
from dlrm_autoshard.tables import TableConfig

_AT_A_TIME = 1 << 20
"""Numbers that are read at once."""


def check_file(table: TableConfig) -> None:
    """UserError where the file that a table starts from cannot be read, or is not of its shape."""
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
            f"'{path}' has {said} numbers, and table '{table.name}', which starts from it, {table.num_embeddings:,} "
            f"rows of {table.embedding_dim}. Give a file of that shape, or the table the file's."
        )


def read_into(weight: Tensor, shard: TableConfig) -> None:
    """Fills a shard's weights, a few rows at a time."""
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
    return UserError(f"the first values of table '{table}' cannot be read from '{path}': {said}")


def _shape(path: Path) -> tuple[int, ...]:
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not np.issubdtype(array.dtype, np.floating):
            raise ValueError(f"it holds {array.dtype}; embeddings are float16, float32 or float64.")
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
    """(row, values) of some rows at a time; mapped, so that no more of the file is read."""
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
