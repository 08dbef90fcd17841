"""A TorchRec sharding plan for a module, by measurements on these ranks.

model = DistributedModelParallel(module, plan=plan(module, first_batch.sparse_features), ...)     # on every rank
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dlrm_autoshard.autoshard.initial_plan import place
from dlrm_autoshard.config import AutoshardConfig
from dlrm_autoshard.distributed.bags import runtime_of
from dlrm_autoshard.distributed.runtime import Runtime
from dlrm_autoshard.distributed.torchrec_plan import to_sharding_plan
from dlrm_autoshard.tables import TableOptimizer, TableStats, measure_table_stats
from dlrm_autoshard.torchrec.sharding import plan_record
from dlrm_autoshard.torchrec.tables import TorchrecError, alike, configs_of, embedding_bags, table_configs, table_key

PLACEMENT = "autoshard_placement"
"""Where Autoshard finds, on the plan, what is known already: the planner with its measured costs."""


def plan(
    module: nn.Module,
    ids: Any,
    *,
    optimizer: TableOptimizer = "rowwise_adagrad",
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    **settings: Any,
) -> Any:
    """A `torchrec.distributed.types.ShardingPlan`, table-wise with fused kernels, of every EmbeddingBagCollection in
    `module`. Collective; the same on every rank.

    ids: a batch of this rank, as training will bring it (as many samples on every rank): a KeyedJaggedTensor with all
    features, or one for each module, {path: ids}. Ids a sample and how often ids repeat are what a plan rests on.
    optimizer: the tables' fused one. group: the ranks; by default all. settings: keys of the YAML's `autoshard`.

    A table's features are planned as one feature with all their ids: their pooled vectors are exchanged one by one,
    which only measured steps know. TorchrecError names the table, feature or module that can't be planned; PlanError
    the rank without memory.
    """
    collections = embedding_bags(module)
    tables = table_configs(collections)
    group = group or dist.group.WORLD
    if group is None:
        raise TorchrecError("there are no ranks to plan for: call torch.distributed.init_process_group before.")
    where = torch.device(device)
    runtime = runtime_of(group, where)
    stats, batch_size = _statistics(collections, ids, runtime)
    placement = place(
        AutoshardConfig(**{"enabled": True, **settings}),
        runtime,
        alike(tables),
        lambda: stats,
        batch_size=batch_size,
        optimizer=optimizer,
        exchange_dtype="fp32",
    )
    record = plan_record(placement.plan, collections, where.type, runtime.local_world_size)
    sharding_plan = to_sharding_plan(record)
    setattr(sharding_plan, PLACEMENT, placement)
    return sharding_plan


def _statistics(collections: Mapping[str, Any], ids: Any, runtime: Runtime) -> tuple[tuple[TableStats, ...], int]:
    """Of every table over the global batch, and its samples."""
    mine: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for path, collection in collections.items():
        features = ids[path] if isinstance(ids, Mapping) else ids
        rows = {
            name: (jagged.lengths().cpu().numpy(), jagged.values().cpu().numpy())
            for name, jagged in features.to_dict().items()
        }
        for config in configs_of(collection):
            missing = [name for name in config.feature_names if name not in rows]
            if missing:
                raise TorchrecError(f"the ids lack feature '{missing[0]}' of table '{config.name}' in '{path}'.")
            mine[table_key(path, config.name, collections)] = [rows[name] for name in config.feature_names]
    gathered = runtime.gather(mine)

    def measured() -> tuple[tuple[TableStats, ...], int]:
        assert gathered is not None
        stats, samples = [], 0
        for name in mine:
            features = [feature for of_rank in gathered for feature in of_rank[name]]
            samples = sum(len(of_rank[name][0][0]) for of_rank in gathered)
            lengths = np.concatenate([lengths.reshape(-1) for lengths, _ in features])
            [found] = measure_table_stats(lengths[None, :], np.concatenate([values for _, values in features]))
            a_sample = found.mean_pooling * len(lengths) / samples
            stats.append(TableStats(a_sample, found.reuse_histogram, found.mean_reuse, samples))
        return tuple(stats), samples

    return runtime.from_rank_0(measured)
