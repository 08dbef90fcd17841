"""Measures how data use tables, before training begins.

measure_stats(source, global_batch=4096, batches=8)       # one TableStats a table

Ids are counted as training will see them: checked, or repaired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dlrm_autoshard.data.batch import DataSource
from dlrm_autoshard.data.checked_read import Stretch
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.data.id_check import IdCheck, OnBadId
from dlrm_autoshard.tables import TableStats, measure_table_stats

MOST_SAMPLES = 1 << 16
"""Read in all: a second's work, and pooling factors to half a percent."""


def measure_stats(
    source: DataSource,
    global_batch: int,
    batches: int,
    features: Features | None = None,
    *,
    on_bad_id: OnBadId = "error",
) -> tuple[TableStats, ...]:
    """Statistics of each table from the first batches of training data, each taken as one global batch. features: the
    source's, where several share a table."""
    features = features or Features.one_each(source.tables)
    total = source.num_samples("train")
    size = min(global_batch, total, MOST_SAMPLES)
    count = max(1, min(batches, total // size, MOST_SAMPLES // size))
    seen, check, ids_F = [], IdCheck(source.tables, on_bad_id), np.zeros(len(source.tables))
    for index in range(count):
        stretch = Stretch(source, "train", 0, index * size, (index + 1) * size)
        batch = stretch.checked(stretch.read(), check)
        ids_F += batch.lengths_TB.numpy().sum(1) / (size * count)
        seen.append(measure_table_stats(*features.joined(batch.lengths_TB.numpy(), batch.values_N.numpy())))
    vectors = features.vectors(ids_F.tolist())
    return tuple(
        replace(_average(table), features=n) for n, table in zip(vectors, zip(*seen, strict=True), strict=True)
    )


def _average(stats: Sequence[TableStats]) -> TableStats:
    histogram = np.mean([stat.reuse_histogram for stat in stats], axis=0)
    sixteenths = [stat.row_sixteenths for stat in stats]
    return TableStats(
        float(np.mean([stat.mean_pooling for stat in stats])),
        tuple(float(share) for share in histogram),
        float(np.mean([stat.mean_reuse for stat in stats])),
        stats[0].batch_size,
        row_sixteenths=tuple(round(row) for row in np.mean(sixteenths, axis=0)) if all(sixteenths) else (),
    )
