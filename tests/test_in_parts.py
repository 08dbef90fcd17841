"""Gradient accumulation in a custom training loop: plain PyTorch's, to the bit where the dense part's gradients are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlrm_autoshard as das
from tests.ranks import run_ranks

TABLES = (das.TableConfig("user", 40, 8), das.TableConfig("item", 12, 4))
OPTIMIZERS: dict[str, Any] = {
    "sgd": das.SGD(lr=0.3),
    "adagrad": das.Adagrad(lr=0.1),
    "rowwise_adagrad": das.RowwiseAdagrad(lr=0.1),
}
SIZES, STEPS = (7, 4, 5), 4


def micro_batches(rank: int, step: int) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    """((lengths, values), labels) each; many samples share rows."""
    generator, found = torch.Generator().manual_seed(100 * step + rank), []
    for size in SIZES:
        lengths = torch.randint(0, 4, (2, size), generator=generator)
        values = [torch.randint(0, t.num_embeddings, (int(n),), generator=generator)
                  for t, n in zip(TABLES, lengths.sum(1), strict=True)]  # fmt: skip
        found.append(((lengths, torch.cat(values)), torch.randint(0, 2, (size,), generator=generator).float()))
    return found


def loss_of(logits: Tensor, labels: Tensor, samples: int) -> Tensor:
    """The share of these in the mean over so many."""
    return nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / samples


class Weighted(nn.Module):
    """A sample's logit is made of that sample's numbers alone, in one order, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12))

    def forward(self, pooled_BD: Tensor) -> Tensor:
        return (pooled_BD * self.weight).sum(1)


def trained(rank: int, world_size: int, optimizer: str, in_parts: bool, learns: bool) -> dict[str, Tensor]:
    """The tables of this rank, and the tower."""
    bags = das.ShardedEmbeddingBags(TABLES, optimizer=OPTIMIZERS[optimizer])
    tower = Weighted()
    dense = das.DataParallelDense(tower, torch.optim.SGD, lr=0.3 if learns else 0.0)
    for step in range(STEPS):
        batches = micro_batches(rank, step)
        pooled = bags(*das.joined_ids([ids for ids, _ in batches]))
        labels = torch.cat([labels for _, labels in batches])
        if in_parts:
            for rows, part in das.in_parts(pooled, SIZES):
                loss_of(tower(part), labels[rows], len(labels)).backward()
        else:
            dense.backward(loss_of(tower(pooled), labels, len(labels)))
        dense.step()
    return {name: value.clone() for name, value in bags.own_tensors().items()} | {"tower": tower.weight.data.clone()}


def all_ways(rank: int, world_size: int) -> dict[tuple[str, bool, bool], dict[str, Tensor]]:
    ways = [(name, parts, learns) for name in OPTIMIZERS for parts in (True, False) for learns in (True, False)]
    return {way: trained(rank, world_size, *way) for way in ways}


def by_plain_pytorch(optimizer: str, initial: dict[str, Tensor]) -> dict[str, Tensor]:
    """As people accumulate gradients: of each rank and micro-batch a backward pass, then one step."""
    bags = [nn.EmbeddingBag.from_pretrained(initial[t.name].clone(), freeze=False, mode="sum") for t in TABLES]
    tower, tables = Weighted(), [bag.weight for bag in bags]
    steps: list[Any] = [torch.optim.SGD(tower.parameters(), lr=0.3)]
    if optimizer != "rowwise_adagrad":
        kind: Any = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adagrad
        steps.append(kind(tables, lr=OPTIMIZERS[optimizer].lr))
    states = [torch.zeros(t.num_embeddings, 1) for t in TABLES]
    for step in range(STEPS):
        for rank in range(2):
            for (lengths, values), labels in micro_batches(rank, step):
                of_table = values.split(lengths.sum(1).tolist())
                starts = lengths.cumsum(1) - lengths
                pooled = [bag(ids, start) for bag, ids, start in zip(bags, of_table, starts, strict=True)]
                loss_of(tower(torch.cat(pooled, 1)), labels, 2 * sum(SIZES)).backward()
        if optimizer == "rowwise_adagrad":
            for table, state in zip(tables, states, strict=True):
                assert table.grad is not None
                state += table.grad.square().mean(1, keepdim=True)
                table.data -= OPTIMIZERS[optimizer].lr * table.grad / (state.sqrt() + OPTIMIZERS[optimizer].eps)
                table.grad = None
        for one in steps:
            one.step()
            one.zero_grad()
    return {t.name: table.detach() for t, table in zip(TABLES, tables, strict=True)} | {"tower": tower.weight.detach()}


def first_weights(rank: int, world_size: int) -> dict[str, Tensor]:
    own = das.ShardedEmbeddingBags(TABLES).own_tensors()
    return {t.name: own[f"{t.name}.weight"].clone() for t in TABLES if f"{t.name}.weight" in own}


@pytest.fixture(scope="module")
def found() -> list[dict[tuple[str, bool, bool], dict[str, Tensor]]]:
    return run_ranks(all_ways, 2, timeout=90)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parts_update_tables_as_one_batch_does_to_the_bit(found: list[Any], optimizer: str) -> None:
    for of_rank in found:
        parts, whole = of_rank[optimizer, True, False], of_rank[optimizer, False, False]
        assert parts.keys() == whole.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parts_train_as_plain_pytorch_accumulates(found: list[Any], optimizer: str) -> None:
    initial = {name: value for own in run_ranks(first_weights, 2) for name, value in own.items()}
    expected = by_plain_pytorch(optimizer, initial)
    seen = set()
    for of_rank in found:
        own = of_rank[optimizer, True, True]
        for name in expected:
            value = own.get(name, own.get(f"{name}.weight"))
            if value is not None:
                seen.add(name)
                # Adagrad's first update is the gradient's sign, also where it is a rounding error beside its parts.
                atol = 1e-4 if optimizer == "adagrad" else 2e-6
                torch.testing.assert_close(value, expected[name], atol=atol, rtol=1e-5)
    assert seen == {"user", "item", "tower"}


def test_parts_that_are_not_of_the_batch_are_refused() -> None:
    pooled = torch.zeros(4, 2)
    with pytest.raises(das.UserError, match="4 samples cannot be divided into 5 parts"):
        next(das.in_parts(pooled, 5))
    with pytest.raises(das.UserError, match="parts have 3 samples, but the batch has 4"):
        next(das.in_parts(pooled, [1, 2]))
    with pytest.raises(das.UserError, match="all with weights_N"):
        das.joined_ids([(pooled,)])
    assert [(rows.start, len(part)) for rows, part in das.in_parts(pooled, 3)] == [(0, 2), (2, 1), (3, 1)]
