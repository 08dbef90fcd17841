"""Sharded lookup and update against plain EmbeddingBag, under any placement."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dlrm_autoshard.config import ExchangeDtypes, TableOptimizerConfig, TablesConfig
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.ranks.groups import new_group
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import Shard, TableConfig
from tests.ranks import run_ranks
from tests.small_embeddings import TABLES, global_batch, own_tensors, train_step

STEPS = 4


def train(rank: int, world_size: int, plan: ShardingPlan, optimizer: str, dtype: str) -> dict[str, torch.Tensor]:
    """Pooled output of each step, and the final weights of this rank's tables."""
    tables = [TableConfig(t.name, t.num_embeddings, t.embedding_dim, dtype=dtype) for t in TABLES]  # type: ignore[arg-type]
    config = TablesConfig(optimizer=TableOptimizerConfig(name=optimizer, lr=0.1))
    group = dist.group.WORLD
    assert group is not None
    embeddings = ShardedEmbeddings(
        tables, plan, config, rank=rank, group=group, id_group=new_group(), device=torch.device("cpu")
    )
    result = {f"pooled{step}": train_step(embeddings, global_batch(step, world_size)[rank]) for step in range(STEPS)}
    return result | own_tensors(embeddings)


def reference(world_size: int) -> dict[str, torch.Tensor]:
    """The same steps with nn.EmbeddingBag and plain SGD in one process."""
    plan = ShardingPlan({t.name: 0 for t in TABLES}, 1)
    bags = {}
    from dlrm_autoshard.distributed.tables.init import initialise
    from dlrm_autoshard.tables import output_order

    for table in TABLES:
        bag = torch.nn.EmbeddingBag(table.num_embeddings, table.embedding_dim, mode="sum")
        with torch.no_grad():
            initialise(bag.weight, table.name, 0)
        bags[table.name] = bag
    assert plan.world_size == 1
    result = {}
    order = output_order(TABLES)
    for step in range(STEPS):
        pooled = []
        for batch in global_batch(step, world_size):
            starts = [0, *batch.lengths_TB.sum(1).cumsum(0).tolist()]
            per_table = []
            for i in order:
                offsets = torch.cat([torch.zeros(1, dtype=torch.int32), batch.lengths_TB[i].cumsum(0)[:-1].int()])
                per_table.append(bags[TABLES[i].name](batch.values_N[starts[i] : starts[i + 1]], offsets))
            pooled.append(torch.cat(per_table, 1))
        result[f"pooled{step}"] = torch.stack(pooled).detach()
        gradient = torch.sin(torch.cat(pooled)).detach() / 10
        torch.cat(pooled).backward(gradient)
        with torch.no_grad():
            for bag in bags.values():
                assert bag.weight.grad is not None
                bag.weight -= 0.1 * bag.weight.grad
                bag.weight.grad = None
    return result | {f"{name}.weight": bag.weight.detach() for name, bag in bags.items()}


@pytest.mark.parametrize("world_size,ranks", [(1, "0000"), (2, "0110"), (2, "1111"), (3, "2020"), (4, "3120")])
def test_equals_embedding_bag(world_size: int, ranks: str) -> None:
    plan = ShardingPlan({t.name: int(r) for t, r in zip(TABLES, ranks, strict=True)}, world_size)
    results = run_ranks(train, world_size, plan, "sgd", "fp32")
    expected = reference(world_size)
    for step in range(STEPS):
        pooled = torch.stack([result[f"pooled{step}"] for result in results])
        torch.testing.assert_close(pooled, expected[f"pooled{step}"], rtol=1e-5, atol=1e-6)
    weights = {key: value for result in results for key, value in result.items() if key.endswith(".weight")}
    assert set(weights) == {f"{t.name}.weight" for t in TABLES}
    for key, weight in weights.items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_placement_changes_no_bit(optimizer: str, dtype: str) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    for ranks in ("0110", "1000", "1111"):
        plan = ShardingPlan({t.name: int(r) for t, r in zip(TABLES, ranks, strict=True)}, 2)
        merged: dict[str, torch.Tensor] = {}
        for rank, result in enumerate(run_ranks(train, 2, plan, optimizer, dtype)):
            merged |= {(f"{rank}.{key}" if key.startswith("pooled") else key): value for key, value in result.items()}
        seen.append(merged)
    for other in seen[1:]:
        assert other.keys() == seen[0].keys()
        for key, value in other.items():
            assert torch.equal(value, seen[0][key]), key


def gradient_of(rank: int, world_size: int, exchange_dtype: str, value: float) -> torch.Tensor:
    """What one SGD step with such gradients moves this rank's table by."""
    plan = ShardingPlan({"a": 0, "b": 1}, world_size)
    config = TablesConfig(optimizer=TableOptimizerConfig(name="sgd", lr=1.0))
    group = dist.group.WORLD
    assert group is not None
    embeddings = ShardedEmbeddings(
        [TableConfig("a", 64, 4), TableConfig("b", 64, 4)], plan, config,
        rank=rank, group=group, id_group=group, device=torch.device("cpu"),
        exchange_dtype=ExchangeDtypes.model_validate(exchange_dtype),
    )  # fmt: skip
    weight = embeddings.storage.tensors(Shard("ab"[rank]))["weight"]
    weight.zero_()
    ids = torch.arange(32, dtype=torch.int32) + 32 * rank
    batch = Batch(torch.zeros(32, 0), torch.ones(2, 32, dtype=torch.int32), ids.repeat(2), torch.zeros(32), 32, 64)
    local = embeddings.lookup(embeddings.distribute(batch).finish())
    embeddings.update(local, embeddings.exchange.send_gradients(torch.full((32, 8), value)).wait())
    return weight.clone()


def test_a_gradient_beyond_fp16s_largest_ruins_no_row() -> None:
    """Of a loss that is a sum, or of a sample that weighs much."""
    for weight in run_ranks(gradient_of, 2, "fp16", 1e5):
        assert torch.isfinite(weight).all() and (weight < -1000).all()


def test_a_gradient_near_fp16s_smallest_step_survives_an_fp16_exchange() -> None:
    for exchange_dtype in ("fp32", "bf16", "fp16"):
        for weight in run_ranks(gradient_of, 2, exchange_dtype, 1e-7):  # fp16's steps there are 6e-8
            torch.testing.assert_close(weight, torch.full((64, 4), -1e-7), rtol=1e-2, atol=0)
