"""Statistics of the tables this rank owns, from the ids that arrive here: pooling in every sampled step, reuse in the
first of an interval. Tables that have moved, by whomever, are observed afresh.

What reuse costs, a sort of that step's ids, is paid when it is asked for, between steps: these few ms would make a
short interval look slower than it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from dlrm_autoshard.data.features import join
from dlrm_autoshard.distributed.moves.movable import ArrivedIds, PlacedTables
from dlrm_autoshard.tables import Shard, TableStats, measure_table_stats, side_by_side


class TableObserver:
    """Counts the ids of sampled steps that arrive at this rank's tables."""

    def __init__(self, embeddings: PlacedTables) -> None:
        self._embeddings = embeddings
        self.begin()

    def begin(self) -> None:
        """Starts counting anew."""
        self._plan = self._embeddings.plan
        self._samples = 0
        self._ids: np.ndarray | None = None
        self._filled: np.ndarray | None = None  # bags with an id
        self._first: tuple[np.ndarray, np.ndarray] | None = None  # lengths [T, W * B] and ids

    def observe(self, ids: ArrivedIds, real_samples: int) -> None:
        """Counts a step's ids. real_samples: over all ranks."""
        if self._embeddings.plan != self._plan:
            self.begin()
        num_bags = ids.batch_size * self._embeddings.plan.world_size
        offsets = ids.offsets.cpu().numpy()
        counts, lengths_TB = np.diff(offsets[::num_bags]), np.diff(offsets).reshape(-1, num_bags)
        filled = np.count_nonzero(lengths_TB, axis=1)
        self._ids = counts if self._ids is None else self._ids + counts
        self._filled = filled if self._filled is None else self._filled + filled
        self._samples += real_samples
        if self._first is None:
            values_N = ids.values_N.to("cpu", copy=True).numpy()  # who gave them may fill their memory anew
            self._first = lengths_TB, values_N

    def add(self, later: TableObserver) -> None:
        """Adds what another observer has counted since, under the same plan."""
        if later._ids is None or later._plan != self._plan:
            return
        if self._ids is None or self._filled is None:
            self._ids, self._filled, self._first = later._ids, later._filled, later._first
        else:
            self._ids, self._filled = self._ids + later._ids, self._filled + later._filled
        self._samples += later._samples

    def summary(self) -> dict[Shard, TableStats]:
        """Returns shard -> statistics, for tables (or row ranges) of which this rank owns something; {} if nothing
        was observed, or tables have moved since. Starts counting anew."""
        if self._ids is None or self._filled is None or self._first is None or self._embeddings.plan != self._plan:
            self.begin()
            return {}
        shards = [table.shard for table in self._embeddings.local_lookups]
        owned = {name: number for number, name in enumerate(dict.fromkeys(shards))}
        shard_of = [owned[name] for name in shards]  # those of one lie side by side
        names = [shard.all_columns for shard in owned]
        lengths_TB, ids_N = join(*self._first, shard_of)
        pooling = np.bincount(shard_of, self._ids, len(owned)) / self._samples
        reuse = measure_table_stats(lengths_TB, ids_N)
        counts = np.bincount(shard_of, self._vectors(), len(owned)).tolist()
        result = {
            name: replace(seen, mean_pooling=float(mean), features=features)
            for name, mean, seen, features in zip(names, pooling, reuse, counts, strict=True)
        }
        self.begin()
        return result

    def _vectors(self) -> np.ndarray | None:
        """Returns the vectors that each lookup sends per sample; None if that is one for each."""
        assert self._ids is not None and self._filled is not None
        dedup, sequences = (getattr(self._embeddings, name, None) for name in ("dedup", "sequences"))
        unpooled = getattr(sequences, "local_unpooled", None)  # lookups whose vectors travel one an id
        filled = self._filled / self._samples if getattr(dedup, "tables", ()) else None  # only filled bags travel
        if unpooled is None:
            return filled
        return np.where(unpooled, self._ids / self._samples, 1.0 if filled is None else filled)


def of_whole_tables(by_rank: Iterable[Mapping[Shard, TableStats]]) -> dict[str, TableStats]:
    """Merges all ranks' summaries into each table's statistics, over ranges of its rows."""
    ranges: dict[str, dict[tuple[int, int], TableStats]] = {}
    for shard, stats in (item for own in by_rank for item in own.items()):
        ranges.setdefault(shard.table, {})[shard.rows or (0, 0)] = stats
    return {table: _together({rows: parts[rows] for rows in side_by_side(parts)}) for table, parts in ranges.items()}


def _together(ranges: Mapping[tuple[int, int], TableStats]) -> TableStats:
    parts = list(ranges.values())
    if len(parts) == 1:
        return parts[0]
    pooling_R = np.array([part.mean_pooling for part in parts])
    pooling, distinct_R = float(pooling_R.sum()), pooling_R / [part.mean_reuse for part in parts]
    weights = distinct_R / max(distinct_R.sum(), 1e-12)
    histogram = np.array([part.reuse_histogram for part in parts]).T @ weights
    reuse = max(1.0, pooling / max(float(distinct_R.sum()), 1e-12)) if pooling else 1.0
    work_R = (pooling_R / max(pooling, 1e-12) + weights) / 2
    return replace(
        parts[0],
        mean_pooling=pooling,
        reuse_histogram=tuple(map(float, histogram)),
        mean_reuse=reuse,
        features=parts[0].features if parts[0].features >= 1 else sum(part.features for part in parts),
        row_sixteenths=_sixteenths(ranges, work_R),
    )


def _sixteenths(ranges: Mapping[tuple[int, int], TableStats], work_R: np.ndarray) -> tuple[int, ...]:
    """Merges the ranges' row sixteenths into the table's. Rows in a range count from its first."""
    rows, work, even = [0.0], [0.0], [number / 16 for number in range(1, 17)]
    for ((first, last), stats), share in zip(ranges.items(), work_R.tolist(), strict=True):
        work += [work[-1] + share * part for part in even]
        rows += [first + row for row in stats.rows_at(even, last - first)]
    return tuple(round(row) for row in np.interp(even[:-1], work, rows))
