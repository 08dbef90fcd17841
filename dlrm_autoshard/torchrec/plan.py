"""Makes a TorchRec sharding plan for a module by measurements on these ranks.

model = DistributedModelParallel(module, plan=plan(module, first_batch.sparse_features), ...)     # on every rank
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlrm_autoshard.autoshard.initial_plan import place
from dlrm_autoshard.config import ExchangeDtypes, parse_sections
from dlrm_autoshard.distributed.ranks.agreement import agree, facts_of
from dlrm_autoshard.distributed.ranks.runtime import runtime_of
from dlrm_autoshard.formats.yaml_file import flat
from dlrm_autoshard.tables import TableOptimizer
from dlrm_autoshard.torchrec.plan_format import to_sharding_plan
from dlrm_autoshard.torchrec.sharding import plan_record, shapes_of
from dlrm_autoshard.torchrec.statistics import ids_by_table, statistics
from dlrm_autoshard.torchrec.tables import TorchrecError, alike, embedding_bags, table_configs

PLACEMENT = "autoshard_placement"
"""Attribute of the plan that holds the planner with its measured costs, for Autoshard."""


def plan(
    module: nn.Module,
    ids: Any,
    *,
    optimizer: TableOptimizer = "rowwise_adagrad",
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **settings: Any,
) -> Any:
    """Returns a `torchrec.distributed.types.ShardingPlan` of every EmbeddingBagCollection in `module`: fused kernels,
    table-wise, and column-wise if `splits` allows it. Collective; the same on every rank.

    ids: a typical batch of this rank (equally many samples on every rank): a KeyedJaggedTensor with all features, or
    one per module, {path: ids}. The plan depends on their number per sample and their reuse. optimizer: the tables'
    fused one. group: the ranks; default all. settings: keys of the YAML's `autoshard`.

    A table's features are planned together: all their ids, and a vector of each. TorchrecError names a table, feature
    or module that cannot be planned; PlanError a rank without memory.
    """
    config = parse_sections(tables={"optimizer": {"name": optimizer}}, autoshard={"enabled": True, **settings})
    collections = embedding_bags(module)
    tables = table_configs(collections)
    group = group or dist.group.WORLD
    if group is None:
        raise TorchrecError("there are no ranks to plan for: call torch.distributed.init_process_group first.")
    runtime = runtime_of(group, device)
    given = flat({"tables": {"optimizer": optimizer}, "autoshard": config.autoshard.model_dump(mode="json")})
    agree(runtime, facts_of(tables) | dict(given) | {"seed": seed})
    gathered = runtime.gather(runtime.on_all(lambda: ids_by_table(collections, ids)))
    stats, batch_size = runtime.from_rank_0(lambda: statistics(gathered or []))
    placement = place(
        config.autoshard,
        runtime,
        alike(tables),
        lambda: [stats[table.name] for table in tables],
        batch_size=batch_size,
        optimizer=config.tables.optimizer,
        exchange_dtype=ExchangeDtypes(),
        shared_memory=False,
        seed=seed,
    )
    record = plan_record(placement.plan, shapes_of(collections), runtime.device.type, runtime.local_ranks)
    sharding_plan = to_sharding_plan(record)
    setattr(sharding_plan, PLACEMENT, placement)
    return sharding_plan
