"""A TorchRec training job with two modules and every kind of table that we handle, for tests that move them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlrm_autoshard.benchmarks.peer_torchrec import find_torchrec
from dlrm_autoshard.plan import ShardingPlan

WHY_NOT = find_torchrec()
"""Why tests that need TorchRec cannot run here; None if they can."""

FEATURES = ("g", "f1", "f2", "h")
BATCH = 8
DIMS = {"users.a": 8, "users.b": 4, "users.c": 8, "users.d": 4, "items.a": 12, "items.e": 4}
TABLES = tuple(DIMS)


class Model(nn.Module):
    """users.a has two features, one shared with users.b; users.c is averaged; users.d is fp16. items.a is another."""

    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
        from torchrec.modules.embedding_configs import DataType

        def config(name: str, rows: int, dim: int, *features: str, **more: Any) -> Any:
            return EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features), **more
            )

        meta = torch.device("meta")
        users = [
            config("a", 60, 8, "f1", "f2"),
            config("b", 200, 4, "f1"),
            config("c", 30, 8, "g", pooling=PoolingType.MEAN),
            config("d", 50, 4, "h", data_type=DataType.FP16),
        ]
        self.users = EmbeddingBagCollection(tables=users, device=meta)
        items = [config("a", 40, 12, "h"), config("e", 90, 4, "g")]
        self.items = EmbeddingBagCollection(tables=items, device=meta)
        torch.manual_seed(5)
        self.tower = nn.Sequential(nn.Linear(48, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, features: Any) -> torch.Tensor:
        pooled = torch.cat([self.users(features).values(), self.items(features=features).values()], 1)
        return nn.functional.softplus(self.tower(pooled)).mean()


def features_of(rank: int, step: int) -> Any:
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=generator)
    values = torch.randint(0, 30, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(list(FEATURES), values, lengths=lengths)


def plan_of(*ranks: int, world_size: int = 2) -> ShardingPlan:
    return ShardingPlan(dict(zip(TABLES, ranks, strict=True)), world_size)


def sharded(plan: Any, optimizer: str = "EXACT_SGD", module: nn.Module | None = None) -> tuple[Any, Any]:
    """Returns a DistributedModelParallel of a Model, and its optimizer. plan: ours, or TorchRec's. Collective."""
    assert find_torchrec() is None
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    from dlrm_autoshard.torchrec.plan_format import to_sharding_plan
    from dlrm_autoshard.torchrec.sharding import plan_record, shapes_of
    from dlrm_autoshard.torchrec.tables import embedding_bags

    module = module or Model()
    fused = {"optimizer": EmbOptimType[optimizer], "learning_rate": 0.5, "stochastic_rounding": False}
    if isinstance(plan, ShardingPlan):
        plan = to_sharding_plan(plan_record(plan, shapes_of(embedding_bags(module)), "cpu"))
    model = DistributedModelParallel(
        module,
        device=torch.device("cpu"),
        plan=plan,
        sharders=[EmbeddingBagCollectionSharder(fused_params=fused)],
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=True),
    )
    with torch.no_grad():  # initial rows that no plan changes
        for name, parameter in sorted(model.named_parameters()):
            if "embedding_bags" in name and parameter.numel():
                generator = torch.Generator().manual_seed(sum(map(ord, name)))
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.SGD(params, lr=0.5)
    )
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def train_step(model: Any, optimizer: Any, features: Any) -> float:
    optimizer.zero_grad()
    loss = model(features)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def all_rows(model: Any) -> dict[str, torch.Tensor]:
    """Returns weights and optimizer state of all tables of all ranks, by name."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    found = dict(model.state_dict())
    for key, states in model.fused_optimizer.state_dict()["state"].items():
        found |= {f"{key}.{name}": value for name, value in states.items()}
    mine = {
        name: value.local_shards()[0].tensor.clone()
        for name, value in found.items()
        if isinstance(value, ShardedTensor) and value.local_shards()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert sum(map(len, everyone)) == len({name for own in everyone for name in own}), "a row has one owner"
    return {name: tensor for own in everyone for name, tensor in own.items()}
