"""Converts our plans to TorchRec's plans of a model's modules, and back.

record = plan_record(plan, shapes_of(collections), "cpu", [0, 1, 0])             # JSON as in plan_format.py
plan = plan_of(sharding_plan, collections, world_size)                   # refuses other kinds of sharding
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import Shard, TableConfig
from dlrm_autoshard.torchrec.plan_format import torchrec_plan
from dlrm_autoshard.torchrec.tables import TorchrecError, configs_of, table_key

_KERNEL, _SHARDINGS = "fused", ("table_wise", "column_wise")


def plan_record(
    plan: ShardingPlan,
    modules: Mapping[str, Sequence[TableConfig]],
    device: str,
    local_ranks: Sequence[int] | None = None,
    replicated: Collection[str] = (),
) -> dict[str, Any]:
    """Returns {module: {table: sharding}}. modules: each one's tables under their names in it. local_ranks: each rank's
    number on its host; default: one host. replicated: tables that the plan does not place, as `table_key` names
    them."""
    record: dict[str, Any] = {}
    for path, tables in modules.items():
        own = dict[str, int]()
        copies = {table.name for table in tables if table_key(path, table.name, modules) in replicated}
        for table in tables:
            for shard in plan.parts_of(table_key(path, table.name, modules)):
                own[Shard.of(table.name, shard.columns, shard.rows)] = plan.rank_of[shard]
        record |= torchrec_plan(ShardingPlan(own, plan.world_size), tables, path, device, local_ranks, copies)
    return record


def shapes_of(collections: Mapping[str, Any]) -> dict[str, list[TableConfig]]:
    """Returns the shapes of each collection's tables under their names in it; without pooling and dtype."""
    return {
        path: [TableConfig(c.name, c.num_embeddings, c.embedding_dim) for c in configs_of(collection)]
        for path, collection in collections.items()
    }


def plan_of(sharding_plan: Any, collections: Mapping[str, Any], world_size: int) -> ShardingPlan:
    """Returns our plan of TorchRec's. TorchrecError names a table with another sharding or kernel."""
    rank_of: dict[str, int] = {}
    for path, collection in collections.items():
        shardings = sharding_plan.plan.get(path)
        if shardings is None:
            raise TorchrecError(f"the plan does not contain module '{path}'; its tables cannot be moved.")
        for config in configs_of(collection):
            sharding = shardings[config.name]
            if sharding.sharding_type not in _SHARDINGS or sharding.compute_kernel != _KERNEL:
                raise TorchrecError(
                    f"table '{config.name}' of '{path}' is sharded {sharding.sharding_type} with the "
                    f"{sharding.compute_kernel} kernel; tables that are moved are sharded {' or '.join(_SHARDINGS)} "
                    f"with the {_KERNEL} kernel. `dlrm_autoshard.torchrec.plan` makes such a plan."
                )
            table = table_key(path, config.name, collections)
            for rank, part in zip(sharding.ranks, sharding.sharding_spec.shards, strict=True):
                start, width = part.shard_offsets[1], part.shard_sizes[1]
                columns = None if width == config.embedding_dim else (start, start + width)
                rank_of[Shard.of(table, columns)] = rank
    return ShardingPlan(rank_of, world_size)
