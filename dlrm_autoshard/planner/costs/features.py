"""Features of a table for the networks: they depend on the table and the batch, never on its companions.

raw_features(tables, stats)                    # [T, 21] raw, as in DreamShard section 3.1
network_features(tables, stats, batch_size)    # [T, 29] logs with fixed scaling
work(tables, stats, batch_size)                # [T, 12] physical work: ids, bytes, distinct rows, ...
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_autoshard.tables import NUM_REUSE_BINS, TableConfig, TableStats

BatchSize = float | np.ndarray
"""Samples of the global batch: one figure, or one a table."""

NUM_RAW = 4 + NUM_REUSE_BINS

WORK = (
    "tables",  # a fixed cost of each table, in thousandths so that its coefficient is microseconds
    "bags",  # samples pooled
    "pooled_values",  # numbers written into the pooled vectors
    "ids",  # rows looked up
    "read_bytes",  # bytes of those rows
    "distinct_rows",  # different rows among them
    "distinct_bytes",  # bytes of different rows: what has to come from memory at least once
    "sorting",  # ids x log2(ids): the backward groups equal ids
    "l2_miss_ids",  # ids, as far as the batch's rows overflow a 1 MiB cache
    "l3_miss_ids",  # ids, as far as they overflow 32 MiB
    "l2_miss_bytes",
    "far_rows",  # distinct rows, as far as the whole table is spread over more than 256 MiB (page walks)
)


def raw_features(tables: Sequence[TableConfig], stats: Sequence[TableStats]) -> np.ndarray:
    """Returns [T, 21]: dim, rows, pooling factor, bytes and reuse histogram, unscaled."""
    return np.array(
        [
            (t.embedding_dim, t.num_embeddings, s.mean_pooling, t.weight_bytes, *s.reuse_histogram)
            for t, s in zip(tables, stats, strict=True)
        ],
        dtype=np.float64,
    ).reshape(len(tables), NUM_RAW)


def distinct_rows(raw_TF: np.ndarray, reuse_T: np.ndarray, seen_T: np.ndarray, batch_size: BatchSize) -> np.ndarray:
    """Returns the expected distinct rows in a batch of `batch_size`, from a measurement with `seen_T` samples.

    Distinct ids grow like ids ** b (Heaps' law). b is the share of distinct ids that were used once, since the chance
    that the next id is new is (ids used once) / ids (Good and Turing).
    """
    ids_seen = raw_TF[:, 2] * seen_T
    used_once = raw_TF[:, 4]
    grown = (ids_seen / reuse_T) * (batch_size / seen_T) ** used_once
    return np.minimum(np.minimum(grown, raw_TF[:, 2] * batch_size), raw_TF[:, 1])


def work(tables: Sequence[TableConfig], stats: Sequence[TableStats], batch_size: BatchSize) -> np.ndarray:
    """Returns [T, 12] in millions, in the order of WORK.

    Coefficients of a linear model of it are nanoseconds each, so such a model is sensible from the start and the
    networks only learn the deviation.
    """
    raw = raw_features(tables, stats)
    dim, rows, pooling, size = raw[:, :4].T
    row_bytes = size / rows
    ids = pooling * batch_size
    distinct = distinct_rows(
        raw, np.array([s.mean_reuse for s in stats]), np.array([float(s.batch_size) for s in stats]), batch_size
    )
    working_set = distinct * row_bytes
    bags = np.array([max(1, s.features) for s in stats]) * batch_size  # empty ones are looked up, too
    l2_miss, l3_miss, far = (_overflow(x, mib) for x, mib in ((working_set, 1), (working_set, 32), (size, 256)))
    columns = (
        np.full(len(tables), 1e3),
        bags,
        bags * dim,
        ids,
        ids * row_bytes,
        distinct,
        working_set,
        ids * np.log2(ids + 1),
        ids * l2_miss,
        ids * l3_miss,
        ids * row_bytes * l2_miss,
        distinct * far,
    )
    return np.stack(columns, axis=1) * 1e-6


def network_features(
    tables: Sequence[TableConfig], stats: Sequence[TableStats], batch_size: BatchSize, work_TP: np.ndarray | None = None
) -> np.ndarray:
    """Returns [T, 29]: the raw features on log scales and derived ones that cost depends on, all about -1 to 1.
    work_TP: the tables' `work`, if known."""
    raw = raw_features(tables, stats)
    dim, rows, pooling, size = raw[:, :4].T
    done = 1e6 * (work(tables, stats, batch_size) if work_TP is None else work_TP)
    ids, distinct, working_set = done[:, 3], done[:, 5], done[:, 6]

    def log(values: np.ndarray, middle: float, spread: float) -> np.ndarray:
        scaled: np.ndarray = (np.log2(values + 1.0) - middle) / spread
        return scaled

    columns = [
        log(dim, 5, 2), log(rows, 16, 6), log(pooling, 3, 3), log(size, 22, 6),
        log(ids, 15, 5), log(ids * dim, 20, 5), log(distinct, 13, 5), log(working_set, 20, 5),
        log(ids / np.maximum(distinct, 1e-9), 2, 3), _overflow(working_set, 1), _overflow(working_set, 32),
        log(np.zeros(len(tables)) + batch_size, 12, 3),
    ]  # fmt: skip
    return np.concatenate([np.stack(columns, axis=1), raw[:, 4:]], axis=1)


NUM_NETWORK = 12 + NUM_REUSE_BINS


def _overflow(num_bytes: np.ndarray, mib: float) -> np.ndarray:
    """Returns 0 if bytes fit well in a cache of `mib`, 1 if they overflow it by far."""
    fraction: np.ndarray = num_bytes / (num_bytes + mib * 2**20)
    return fraction
