"""Converts a plan to the form that TorchRec's DistributedModelParallel takes.

record = torchrec_plan(plan, tables, module="sparse_arch.embedding_bag_collection")
sharding_plan = to_sharding_plan(record)             # with torchrec installed: DistributedModelParallel(plan=...)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dlrm_autoshard.plan import PlanError, ShardingPlan, shards_by_table
from dlrm_autoshard.plan.cuts import by_rows
from dlrm_autoshard.tables import Shard, TableConfig

DEFAULT_MODULE = "embedding_bag_collection"


def torchrec_plan(
    plan: ShardingPlan,
    tables: Sequence[TableConfig],
    module: str = DEFAULT_MODULE,
    device: str = "cpu",
    local_ranks: Sequence[int] | None = None,
    replicated: Collection[str] = (),
) -> dict[str, Any]:
    """Returns a plan as JSON {module: {table: {sharding_type, compute_kernel, ranks, sharding_spec}}}, made without
    torchrec; `to_sharding_plan` turns it into torchrec's classes.

    Kernels are fused; whole tables are table-wise, column shards column-wise, row shards row-wise if they are equal
    blocks, one per rank in order (else PlanError). Replicated tables, which the plan does not place, are data-parallel:
    DDP sums their gradients. device: 'cpu' or 'cuda'. local_ranks: each rank's number, and GPU, on its host; default:
    one host.
    torchrec; `to_sharding_plan` turns it into torchrec's own classes.
    """
    placed = [table for table in tables if table.name not in replicated]
    own = {
        table.name: {
            "sharding_type": "data_parallel",
            "compute_kernel": "dense",
            "ranks": list(range(plan.world_size)),
            "sharding_spec": None,
        }
        for table in tables
        if table.name in replicated
    }
    return {
        module: {
            table.name: {
                "sharding_type": _sharding_type(plan, table, shards),
                "compute_kernel": "fused",
                "ranks": [plan.rank_of[shard.name] for shard in shards],
                "sharding_spec": {
                    "shards": [
                        {
                            "shard_offsets": [shard.rows[0], shard.columns[0]],
                            "shard_sizes": [shard.num_embeddings, shard.embedding_dim],
                            "placement": _placement(plan.rank_of[shard.name], device, local_ranks),
                        }
                        for shard in shards
                    ]
                },
            }
            for table, shards in zip(placed, shards_by_table(placed, plan), strict=True)
        }
        | own
    }


def _sharding_type(plan: ShardingPlan, table: TableConfig, shards: Sequence[TableConfig]) -> str:
    if len(shards) == 1:
        return "table_wise"
    if not by_rows(shards):
        return "column_wise"
    block = -(-table.num_embeddings // plan.world_size)
    for rank in range(plan.world_size):
        rows = (rank * block, min((rank + 1) * block, table.num_embeddings))
        if rows[0] >= rows[1] or plan.rank_of.get(Shard.of(table.name, rows=rows)) != rank:
            raise PlanError(
                f"the plan splits table '{table.name}' by rows, but TorchRec's row-wise sharding has {block:,} of its "
                f"{table.num_embeddings:,} rows on each of {plan.world_size} ranks, in order. Plan without row shards: "
                "autoshard.splits.rows: never, or plan --rows never."
            )
    return "row_wise"


def check_no_rows(plan: ShardingPlan) -> None:
    """Raises PlanError if a table is split by rows: TorchRec's row-wise sharding has equal blocks on all ranks, which
    moves cannot change."""
    for table in plan.row_split_tables:
        raise PlanError(
            f"the plan splits table '{table}' by rows, but TorchRec's row-wise sharding has equal blocks "
            "on all ranks. Plan without row shards: autoshard.splits.rows: never, or plan --rows never."
        )


def to_sharding_plan(record: Mapping[str, Any]) -> Any:
    """Returns a torchrec.distributed.types.ShardingPlan; ImportError without torchrec."""
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding
    from torchrec.distributed.types import ShardingPlan as TorchrecPlan

    return TorchrecPlan(
        plan={
            module: EmbeddingModuleShardingPlan(
                {
                    table: ParameterSharding(
                        sharding_type=sharding["sharding_type"],
                        compute_kernel=sharding["compute_kernel"],
                        ranks=list(sharding["ranks"]),
                        sharding_spec=None
                        if sharding["sharding_spec"] is None
                        else EnumerableShardingSpec(
                            [ShardMetadata(**shard) for shard in sharding["sharding_spec"]["shards"]]
                        ),
                    )
                    for table, sharding in shardings.items()
                }
            )
            for module, shardings in record.items()
        }
    )


def python_source(record: Mapping[str, Any]) -> str:
    """Returns a Python file that makes `sharding_plan` with torchrec alone."""
    return f'''"""DistributedModelParallel(module, plan=sharding_plan): tables on ranks, planned by dlrm_autoshard."""

from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

PLAN = {_literal(record)}


def _sharding(sharding_type, compute_kernel, ranks, sharding_spec):
    if sharding_spec is not None:
        sharding_spec = EnumerableShardingSpec([ShardMetadata(**shard) for shard in sharding_spec["shards"]])
    return ParameterSharding(sharding_type, compute_kernel, ranks, sharding_spec)


sharding_plan = ShardingPlan(
    {{
        module: EmbeddingModuleShardingPlan({{table: _sharding(**sharding) for table, sharding in tables.items()}})
        for module, tables in PLAN.items()
    }}
)
'''


def _literal(record: Mapping[str, Any]) -> str:
    """Returns the record as a Python literal."""
    return json.dumps(record, indent=4).replace('"sharding_spec": null', '"sharding_spec": None')


def _placement(rank: int, device: str, local_ranks: Sequence[int] | None) -> str:
    number = rank if local_ranks is None else local_ranks[rank]
    return f"rank:{rank}/cpu" if device == "cpu" else f"rank:{rank}/cuda:{number}"
