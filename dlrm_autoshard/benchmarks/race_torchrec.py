"""TorchRec's side of `bench race`: the same tables, of several dims, and the same dense part, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlrm_autoshard.benchmarks.peer_torchrec import find_torchrec
from dlrm_autoshard.benchmarks.workloads import DENSE_LR, TABLE_LR
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.torchrec_plan import to_sharding_plan, torchrec_plan
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig


def make_step(
    tables: Sequence[TableConfig], pooling: Sequence[float], num_dense: int, batch_size: int, plan: ShardingPlan | None
) -> Callable[[Batch], None]:
    """plan: None for that of TorchRec's planner, which is told each table's pooling. Collective."""
    reason = find_torchrec()
    if reason is not None:
        raise ModuleNotFoundError(reason)
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingType
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keys = [table.name for table in tables]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            configs = [
                EmbeddingBagConfig(
                    name=t.name, embedding_dim=t.embedding_dim, num_embeddings=t.num_embeddings, feature_names=[t.name]
                )
                for t in tables
            ]
            self.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
            self.bottom = nn.Sequential(nn.Linear(num_dense, 64), nn.ReLU())
            width = 64 + sum(table.embedding_dim for table in tables)
            self.top = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, dense: torch.Tensor, features: Any, labels: torch.Tensor) -> torch.Tensor:
            pooled = self.ebc(features).values()
            logits = self.top(torch.cat([self.bottom(dense), pooled], 1)).squeeze(1)
            return nn.functional.binary_cross_entropy_with_logits(logits, labels)

    model = Model()
    sharder = EmbeddingBagCollectionSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": TABLE_LR,
            "eps": 1e-8,
            "bounds_check_mode": BoundsCheckMode.NONE,  # the loader checks ids, as it does for us
        }
    )
    if plan is None:
        constraints = {
            table.name: ParameterConstraints(
                sharding_types=[ShardingType.TABLE_WISE.value], compute_kernels=["fused"], pooling_factors=[mean]
            )
            for table, mean in zip(tables, pooling, strict=True)
        }
        topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
        planner = EmbeddingShardingPlanner(topology=topology, batch_size=batch_size, constraints=constraints)
        its_plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    else:
        its_plan = to_sharding_plan(torchrec_plan(plan, tables, "ebc"))
    sharded = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=its_plan,
        sharders=[sharder],
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=True),
    )
    dense = [p for name, p in sharded.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.Adagrad(dense, lr=DENSE_LR)  # as our jobs have by default

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        features = KeyedJaggedTensor(keys, batch.values_N, lengths=batch.lengths_TB.flatten())
        sharded(batch.dense_BF, features, batch.labels_B).backward()
        optimizer.step()

    return step
