"""Plans as TorchRec's own helpers make them, of every way to shard that both know."""

from __future__ import annotations

from typing import Any

import pytest

from dlrm_autoshard.benchmarks.peer_torchrec import find_torchrec
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig
from dlrm_autoshard.torchrec.plan_format import to_sharding_plan, torchrec_plan
from tests.ranks import run_ranks

TABLES = (TableConfig("day", 7, 8), TableConfig("user", 40, 8), TableConfig("item", 30, 16), TableConfig("ad", 101, 8))
PLAN = ShardingPlan({"user": 1, "item[0:8]": 1, "item[8:16]": 0, "ad[rows 0:51]": 0, "ad[rows 51:101]": 1}, 2)


def _both(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours and theirs: (type, kernel, ranks, [(offsets, sizes, placement)]) of each table."""
    find_torchrec()
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import sharding_plan as helpers
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=[table.name],
        )
        for table in TABLES
    ]
    ways = {
        "day": helpers.data_parallel(),
        "user": helpers.table_wise(rank=1, compute_kernel="fused"),
        "item": helpers.column_wise(ranks=[1, 0], compute_kernel="fused"),
        "ad": helpers.row_wise(compute_kernel="fused"),
    }
    theirs = helpers.construct_module_sharding_plan(
        EmbeddingBagCollection(tables=configs, device=torch.device("meta")),
        ways,
        sharder=EmbeddingBagCollectionSharder(),
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    ours = to_sharding_plan(torchrec_plan(PLAN, TABLES, replicated=["day"])).plan["embedding_bag_collection"]
    return {name: _facts(ours[name]) for name in ways}, {name: _facts(theirs[name]) for name in ways}


def _facts(sharding: Any) -> Any:
    shards = () if sharding.sharding_spec is None else sharding.sharding_spec.shards
    own = [([*shard.shard_offsets], [*shard.shard_sizes], str(shard.placement)) for shard in shards]
    return sharding.sharding_type, sharding.compute_kernel, sharding.ranks, own


@pytest.mark.skipif(find_torchrec() is not None, reason=find_torchrec() or "")
def test_our_entries_are_those_of_torchrecs_own_helpers() -> None:
    for ours, theirs in run_ranks(_both, 2):
        assert ours == theirs
