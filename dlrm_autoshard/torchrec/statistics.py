"""Measures statistics of TorchRec's tables on a batch's ids; a table's features count together.

stats, samples = statistics([ids_by_table(collections, ids) for each rank])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dlrm_autoshard.tables import TableStats, measure_table_stats
from dlrm_autoshard.torchrec.tables import TorchrecError, configs_of, table_key

IdsByTable = Mapping[str, list[tuple[np.ndarray, np.ndarray]]]
"""Each table's features: lengths [B] and ids [N]."""


def ids_by_table(collections: Mapping[str, Any], ids: Any) -> IdsByTable:
    """Returns the ids of each table. ids: a KeyedJaggedTensor with all features, or one per module by its path.
    TorchrecError names a missing feature."""
    found = {}
    for path, collection in collections.items():
        if isinstance(ids, Mapping) and path not in ids:
            raise TorchrecError(f"the ids lack module '{path}'; they have {', '.join(map(repr, ids))}.")
        features = (ids[path] if isinstance(ids, Mapping) else ids).to_dict()
        rows = {
            key: (jagged.lengths().cpu().numpy(), jagged.values().cpu().numpy()) for key, jagged in features.items()
        }
        for config in configs_of(collection):
            missing = [name for name in config.feature_names if name not in rows]
            if missing:
                raise TorchrecError(f"the ids lack feature '{missing[0]}' of table '{config.name}' in '{path}'.")
            found[table_key(path, config.name, collections)] = [rows[name] for name in config.feature_names]
    return found


def statistics(of_ranks: Sequence[IdsByTable]) -> tuple[dict[str, TableStats], int]:
    """Returns each table's statistics over all ranks' batches, and the number of samples."""
    found, samples = {}, 0
    for name in of_ranks[0]:
        samples = sum(len(ids[name][0][0]) for ids in of_ranks)
        lengths_B = np.concatenate([np.sum([row for row, _ in ids[name]], axis=0) for ids in of_ranks])
        values_N = np.concatenate([values for ids in of_ranks for _, values in ids[name]])
        [stats] = measure_table_stats(lengths_B[None, :], values_N)
        found[name] = replace(stats, features=len(of_ranks[0][name]))
    return found, samples
