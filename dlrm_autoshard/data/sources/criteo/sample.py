"""Makes a small click log in Criteo's layout, to try out a config and for tests.

    write_sample_layout(Path("data/criteo"), rows_per_day=[50_000, 10_000])     # npy, multi-hot npz included

Ids follow a power law; labels come from the hidden model of synthetic data, so that a model can learn (AUC above 0.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import SyntheticData, SyntheticTable
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.hashing import GOLDEN, key_of, mix64
from dlrm_autoshard.data.new_folder import new_folder
from dlrm_autoshard.data.resolve_tables import TableRows, resolve_tables
from dlrm_autoshard.data.sources.criteo.npy_files import NpyWriter
from dlrm_autoshard.data.sources.criteo.preprocess import write_tables_file
from dlrm_autoshard.data.sources.criteo.text import NUM_CATEGORIES, NUM_INTEGERS
from dlrm_autoshard.data.sources.synthetic import SyntheticSource

# 3 to 100,000 categories, about as uneven as Criteo's.
SAMPLE_ROWS = (
    1460, 583, 100000, 100000, 305, 24, 12517, 633, 3, 93145, 5683, 100000, 3194,
    27, 14992, 100000, 10, 5652, 2173, 4, 100000, 18, 15, 100000, 105, 100000,
)  # fmt: skip
MULTI_HOT_SIZES = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids per sample and table of MLPerf's DLRM-DCNv2."""


def write_sample_layout(out: Path, rows_per_day: Sequence[int], seed: int = 0) -> None:
    """Writes the layout of `criteo/source.py` with one id per sample, multi-hot files beside it, and tables.json."""
    source = sample_source(seed)
    first = 0
    with new_folder(out) as folder:
        for day, rows in enumerate(rows_per_day):
            batch = source.read("train", 0, first, first + rows)
            first += rows
            ids_TB = batch.values_N.numpy().reshape(NUM_CATEGORIES, rows)
            with (
                NpyWriter(folder / f"day_{day}_dense.npy", NUM_INTEGERS, np.float32) as dense,
                NpyWriter(folder / f"day_{day}_sparse.npy", NUM_CATEGORIES, np.int32) as sparse,
                NpyWriter(folder / f"day_{day}_labels.npy", 1, np.int32) as labels,
            ):
                dense.append(np.log(integers(batch).astype(np.float32) + 3))
                sparse.append(ids_TB.T)
                labels.append(batch.labels_B.numpy())
            multi_hot = {str(table): _multi_hot(ids_B, table) for table, ids_B in enumerate(ids_TB)}
            np.savez(folder / f"day_{day}_sparse_multi_hot.npz", allow_pickle=False, **multi_hot)
        write_tables_file(folder, SAMPLE_ROWS, encoding={"name": "sample", "seed": seed})


def sample_source(seed: int) -> SyntheticSource:
    """Returns a synthetic source with 26 tables like Criteo's, but small."""
    tables = [SyntheticTable(name=f"cat_{i}", num_embeddings=rows) for i, rows in enumerate(SAMPLE_ROWS)]
    data = SyntheticData(source="synthetic", tables=tables, num_dense=NUM_INTEGERS, seed=seed)
    rows = [TableRows(table.name, table.num_embeddings) for table in tables]
    return SyntheticSource(data, resolve_tables(rows, TablesConfig()))


def integers(batch: Batch) -> NDArray[np.int64]:
    """Turns dense features into counts from -1 to about 20,000, most of them small."""
    return np.floor(np.exp(10 * batch.dense_BF.numpy().astype(np.float64))).astype(np.int64) - 2


def _multi_hot(ids_B: NDArray[np.int32], table: int) -> NDArray[np.int32]:
    """Returns further ids computed from the first, as MLPerf made its multi-hot data."""
    steps = np.arange(MULTI_HOT_SIZES[table], dtype=np.uint64) * GOLDEN
    drawn = mix64(ids_B.astype(np.uint64)[:, None] + steps + key_of("multi-hot", table)) % np.uint64(SAMPLE_ROWS[table])
    drawn[:, 0] = ids_B
    return drawn.astype(np.int32)
