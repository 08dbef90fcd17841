"""Measures how the data uses tables, before training begins.

measure_stats(source, global_batch=4096, batches=8)       # one TableStats per table

Ids are counted as training will see them: checked or repaired.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dlrm_autoshard.data.bags_once import bags_once
from dlrm_autoshard.data.batch import Batch, DataSource
from dlrm_autoshard.data.checked_read import Stretch
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.data.id_check import IdCheck, OnBadId
from dlrm_autoshard.data.rows_once import ids_and_different, rows_once
from dlrm_autoshard.tables import TableStats, measure_table_stats

MOST_SAMPLES = 1 << 16
"""Most samples to read: a second of work, and pooling factors to half a percent."""


@dataclass(frozen=True)
class SentOnce:
    """Which ids of a rank's batch are sent once each: those of sequences, or of some pooled tables.

    samples: samples of the rank's batch. tables: names of the pooled tables."""

    samples: int
    sequences: bool = False
    tables: Collection[str] = ()

    def sent(self, batch: Batch, features: Features) -> Batch:
        if self.sequences:
            batch = rows_once(batch, features.sequence_numbers)[0]
        return bags_once(batch, features.pooled_of(self.tables))[0] if self.tables else batch


def measure_stats(
    source: DataSource,
    global_batch: int,
    batches: int,
    features: Features | None = None,
    *,
    on_bad_id: OnBadId = "error",
    once: SentOnce | None = None,
) -> tuple[TableStats, ...]:
    """Returns each table's statistics over the first training batches, each taken as one global batch.

    features: the source's, if some share a table. once: count ids as they reach the tables' owners; lookups and
    exchanges cost that, and steps observe that."""
    features = features or Features.one_each(source.tables)
    total = source.num_samples("train")
    size = min(global_batch, total, MOST_SAMPLES)
    count = max(1, min(batches, total // size, MOST_SAMPLES // size))
    seen, check, ids_F, filled_F = [], IdCheck(source.tables, on_bad_id), *np.zeros((2, len(source.tables)))
    for index in range(count):
        stop = (index + 1) * size
        parts = list[Batch]()
        step = size if once is None else once.samples
        for first in range(index * size, stop, step):
            stretch = Stretch(source, "train", 0, first, min(first + step, stop))
            part = stretch.checked(stretch.read(), check)
            parts.append(part if once is None else once.sent(part, features))
        lengths_FB, values_N = _beside(parts)
        ids_F += lengths_FB.sum(1) / (size * count)
        filled_F += (lengths_FB > 0).mean(1) / count
        seen.append(measure_table_stats(*features.joined(lengths_FB, values_N)))
    vectors = features.vectors(ids_F.tolist(), filled_F.tolist() if once is not None and once.tables else None)
    return tuple(
        replace(_average(table), features=n) for n, table in zip(vectors, zip(*seen, strict=True), strict=True)
    )


def share_of_different_ids(source: DataSource, samples: int, features: Features, *, on_bad_id: OnBadId) -> float:
    """Returns distinct ids / ids of sequences, within a rank's first training batch."""
    stretch = Stretch(source, "train", 0, 0, min(samples, source.num_samples("train"), MOST_SAMPLES))
    batch = stretch.checked(stretch.read(), IdCheck(source.tables, on_bad_id))
    ids, different = ids_and_different(batch, features.sequence_numbers)
    return different / max(ids, 1)


def _beside(parts: Sequence[Batch]) -> tuple[np.ndarray, np.ndarray]:
    """Returns lengths [F, B], and ids feature by feature, of all parts' samples."""
    by_feature = zip(*(part.values_N.split(part.lengths_TB.sum(1).tolist()) for part in parts), strict=True)
    values_N = torch.cat([ids for of_parts in by_feature for ids in of_parts])
    return np.concatenate([part.lengths_TB.numpy() for part in parts], 1), values_N.numpy()


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
