"""Weight decay and cut gradients of tables: what plain PyTorch computes, and the same bits under any plan; refused in a
sentence where an optimizer has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm_autoshard.config import ConfigError, parse_config
from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.tables.init import initialise
from dlrm_autoshard.distributed.tables.optimizers import SGD, Adagrad, RowwiseAdagrad
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.optimizers import TableOptimizerConfig
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks

ITEM, DAY = TableConfig("item", 40, 8), TableConfig("day", 7, 4, pooling="mean")
SPEED = TableConfig("speed", 30, 4, optimizer=SGD(lr=0.3, max_gradient=0.002))
TABLES, BATCH, STEPS = (ITEM, DAY, SPEED), 6, 4
PLANS: list[dict[str, int]] = [
    {"item": 0, "day": 1, "speed": 1},
    {"item[rows 0:13]": 1, "item[rows 13:40]": 0, "day": 0, "speed": 0},
]


def ids_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(TABLES), BATCH), generator=generator)
    counts = zip(TABLES, lengths.sum(1).tolist(), strict=True)
    return lengths, torch.cat([torch.randint(0, t.num_embeddings, (n,), generator=generator) for t, n in counts])


def loss_of(pooled_BD: Tensor) -> Tensor:
    return (pooled_BD * torch.linspace(-1, 3, pooled_BD.shape[1])).sin().sum(1).mean()


def plain(optimizer: TableOptimizerConfig) -> dict[str, Tensor]:
    """The tables after some steps of nn.EmbeddingBag's, on both ranks' samples."""
    bags = {t.name: nn.EmbeddingBag(t.num_embeddings, t.embedding_dim, mode=t.pooling) for t in TABLES}
    states = {
        t.name: torch.zeros(t.num_embeddings, 1 if optimizer.name[:3] == "row" else t.embedding_dim) for t in TABLES
    }
    for t in TABLES:
        initialise(bags[t.name].weight.data, t.name, 0)
    for step in range(STEPS):
        total, seen = torch.zeros(()), {t.name: list[Tensor]() for t in TABLES}
        for rank in range(2):
            lengths, values = ids_of(rank, step)
            pooled = []
            for t, part, row in zip(TABLES, values.split(lengths.sum(1).tolist()), lengths, strict=True):
                one = bags[t.name](part, torch.cat([torch.zeros(1, dtype=torch.int64), row.cumsum(0)[:-1]]))
                if (most := (t.optimizer or optimizer).max_gradient) is not None:
                    one.register_hook(lambda gradient, most=most: gradient.clamp(-most, most))
                seen[t.name].append(part)
                pooled.append(one)
            total = total + loss_of(torch.cat(pooled, 1)) / 2
        total.backward()
        for t in TABLES:
            own, weight, state = t.optimizer or optimizer, bags[t.name].weight, states[t.name]
            rows = torch.cat(seen[t.name]).unique()
            assert weight.grad is not None
            gradient = weight.grad[rows] + own.weight_decay * weight.data[rows]
            rate = torch.tensor(own.lr)
            if own.name != "sgd":
                square = gradient.square()
                state[rows] += square.mean(1, keepdim=True) if own.name == "rowwise_adagrad" else square
                rate = own.lr / (state[rows].sqrt() + own.eps)
            weight.data[rows] -= rate * gradient
            weight.grad = None
    return {t.name: bags[t.name].weight.detach() for t in TABLES}


def ours(rank: int, world_size: int, optimizer: TableOptimizerConfig, plan: dict[str, int]) -> dict[str, Tensor]:
    bags = ShardedEmbeddingBags(TABLES, optimizer=optimizer, plan=ShardingPlan(plan, world_size))
    for step in range(STEPS):
        loss_of(bags(*ids_of(rank, step))).backward()
    return {name: value.clone() for name, value in bags.own_tensors().items() if name.endswith(".weight")}


def trained(optimizer: TableOptimizerConfig, plan: dict[str, int]) -> dict[str, Tensor]:
    found = {name: value for of_rank in run_ranks(ours, 2, optimizer, plan) for name, value in of_rank.items()}
    return {
        t.name: torch.cat([found[n] for n in sorted(found, key=len) if n.split("[")[0].split(".")[0] == t.name])
        for t in TABLES
    }


@pytest.mark.parametrize(
    "optimizer",
    [
        RowwiseAdagrad(lr=0.1, weight_decay=0.3),
        RowwiseAdagrad(lr=0.1, weight_decay=0.05, max_gradient=0.01),
        Adagrad(lr=0.1, max_gradient=0.004),
        SGD(lr=0.5, max_gradient=0.004),
    ],
    ids=str,
)
def test_tables_learn_as_plain_pytorch_has_them(optimizer: TableOptimizerConfig) -> None:
    expected, whole, split = plain(optimizer), trained(optimizer, PLANS[0]), trained(optimizer, PLANS[1])
    for name, weight in expected.items():
        torch.testing.assert_close(whole[name], weight, rtol=1e-5, atol=1e-6)
        assert torch.equal(split[name], whole[name]), name


def unlike_without(rank: int, world_size: int) -> bool:
    """Whether cutting and decay change anything at all."""
    wild, tame = (ours(rank, world_size, own, PLANS[0]) for own in (SGD(lr=0.5), SGD(lr=0.5, max_gradient=0.004)))
    return any(not torch.equal(wild[name], tame[name]) for name in wild)


def test_what_is_asked_is_done() -> None:
    assert run_ranks(unlike_without, 2) == [True, True]


@pytest.mark.parametrize(
    "tables,said",
    [
        ({"optimizer": {"name": "sgd", "weight_decay": 0.1}}, "'sgd' has none"),
        (
            {"optimizer": {"weight_decay": 0.1}, "per_table": {"item": {"optimizer": {"name": "adagrad"}}}},
            "'adagrad' has none",
        ),
    ],
)
def test_an_optimizer_without_weight_decay_is_named(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(
            {"data": {"source": "synthetic", "tables": [{"name": "item", "num_embeddings": 9}]}, "tables": tables}
        )


def replicated_and_decaying(rank: int, world_size: int) -> str:
    with pytest.raises(UserError) as caught:
        ShardedEmbeddingBags(TABLES, optimizer=RowwiseAdagrad(weight_decay=0.1), replicate=["day"])
    dist.barrier()
    return str(caught.value)


def test_copies_on_every_rank_have_no_weight_decay() -> None:
    assert all("weight decay needs the rows" in said for said in run_ranks(replicated_and_decaying, 2))
