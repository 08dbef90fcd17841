"""Statistics of the tables this rank owns, from the ids that arrive here: pooling in every sampled step, reuse in the
first of an interval. Tables that have moved, by whomever, are observed afresh.

What reuse costs, a sort of that step's ids, is paid when it is asked for, between steps: these few ms would make a
short interval look slower than it is.
"""

from __future__ import annotations

import numpy as np

from dlrm_autoshard.data.features import join
from dlrm_autoshard.distributed.moves.movable import ArrivedIds, PlacedTables
from dlrm_autoshard.tables import Shard, TableStats, measure_table_stats


class TableObserver:
    def __init__(self, embeddings: PlacedTables) -> None:
        self._embeddings = embeddings
        self._begin()

    def _begin(self) -> None:
        self._plan = self._embeddings.plan
        self._samples = 0
        self._ids: np.ndarray | None = None
        self._first: tuple[np.ndarray, np.ndarray] | None = None  # lengths [T, W * B] and ids

    def observe(self, ids: ArrivedIds, real_samples: int) -> None:
        """real_samples: over all ranks."""
        if self._embeddings.plan != self._plan:
            self._begin()
        num_bags = ids.batch_size * self._embeddings.plan.world_size
        offsets = ids.offsets.cpu().numpy()
        counts = np.diff(offsets[::num_bags])
        self._ids = counts if self._ids is None else self._ids + counts
        self._samples += real_samples
        if self._first is None:
            values_N = ids.values_N.to("cpu", copy=True).numpy()  # who gave them may fill their memory anew
            self._first = np.diff(offsets).reshape(-1, num_bags), values_N

    def summary(self) -> dict[str, TableStats]:
        """name -> statistics, for the tables of which this rank owns something; {} where nothing was observed, or
        tables have moved since. Starts afresh."""
        if self._ids is None or self._first is None or self._embeddings.plan != self._plan:
            self._begin()
            return {}
        shards = [shard.name for shard in self._embeddings.local_lookups]
        owned = {name: number for number, name in enumerate(dict.fromkeys(shards))}
        shard_of = [owned[name] for name in shards]  # those of one lie side by side
        names = [Shard.parse(name).table for name in owned]
        lengths_TB, ids_N = join(*self._first, shard_of)
        pooling = np.bincount(shard_of, self._ids, len(owned)) / self._samples
        reuse = measure_table_stats(lengths_TB, ids_N)
        result = {
            name: TableStats(float(mean), seen.reuse_histogram, seen.mean_reuse, seen.batch_size, features)
            for name, mean, seen, features in zip(names, pooling, reuse, np.bincount(shard_of).tolist(), strict=True)
        }
        self._begin()
        return result
