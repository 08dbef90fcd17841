"""Tables with dtypes, optimizers and learning rates of their own train as each would alone, under every plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.lookup.embeddings import initialise
from dlrm_autoshard.distributed.tables.optimizers import SGD, Adagrad, Frozen, RowwiseAdagrad
from dlrm_autoshard.optimizers import TableOptimizerConfig
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks

DEFAULT = RowwiseAdagrad(lr=0.1)
TABLES = (
    TableConfig("plain", 60, 16),
    TableConfig("sgd", 200, 8, optimizer=SGD(lr=0.5)),
    TableConfig("half", 90, 16, dtype="fp16"),
    TableConfig("frozen", 40, 8, optimizer=Frozen()),
    TableConfig("mean", 7, 8, pooling="mean"),
    TableConfig("half_adagrad", 300, 8, dtype="fp16", optimizer=Adagrad(lr=0.2)),
    TableConfig("slow", 30, 16, optimizer=RowwiseAdagrad(lr=0.01)),
    TableConfig("sgd_too", 50, 16, optimizer=SGD(lr=0.5)),
)
NAMES = [table.name for table in TABLES]
BATCH, STEPS = 6, 5


def ids_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 4, (len(TABLES), BATCH), generator=generator)
    values = [
        torch.randint(0, table.num_embeddings, (count,), generator=generator)
        for table, count in zip(TABLES, lengths.sum(1).tolist(), strict=True)
    ]
    return lengths, torch.cat(values)


def lr_scale(step: int) -> float:
    """As a schedule would have it."""
    return 1.0 / (1 + step)


def update(weight: Tensor, state: Tensor, gradient: Tensor, optimizer: TableOptimizerConfig, lr: float) -> None:
    """Textbook steps, on float32; rounded to the table's dtype."""
    if optimizer.name == "frozen":
        return
    if optimizer.name == "sgd":
        step = gradient
    elif optimizer.name == "adagrad":
        state += gradient.square()
        step = gradient / (state.sqrt() + optimizer.eps)
    else:
        state += gradient.square().mean(1, keepdim=True)
        step = gradient / (state.sqrt() + optimizer.eps)
    weight.copy_(weight.float() - lr * step)


def plain_loop(world_size: int) -> dict[str, Tensor]:
    """Every table's weights after the steps, by nn.EmbeddingBag."""
    weights, states = {}, {}
    for table in TABLES:
        weight = torch.empty(table.num_embeddings, table.embedding_dim)
        weight = weight.half() if table.dtype == "fp16" else weight
        initialise(weight, table.name, 0)
        weights[table.name], states[table.name] = weight, torch.zeros_like(weight, dtype=torch.float32)
    for step in range(STEPS):
        leaves = {name: weight.float().clone().requires_grad_() for name, weight in weights.items()}
        for rank in range(world_size):
            lengths, values = ids_of(rank, step)
            parts = values.split(lengths.sum(1).tolist())
            pooled = [
                nn.functional.embedding_bag(
                    part, leaves[t.name], nn.functional.pad(row.cumsum(0)[:-1], (1, 0)), mode=t.pooling
                )
                for t, part, row in zip(TABLES, parts, lengths, strict=True)
            ]
            (torch.cat(pooled, 1).sin().mean() / world_size).backward()
        for table in TABLES:
            optimizer, gradient = table.optimizer or DEFAULT, leaves[table.name].grad
            assert gradient is not None
            update(weights[table.name], states[table.name], gradient, optimizer, optimizer.lr * lr_scale(step))
    return weights


def our_loop(rank: int, world_size: int, plans: list[ShardingPlan], how: str = "") -> dict[str, Tensor]:
    """Own weights after the steps. plans: at the start, and after each of the first steps."""
    bags = ShardedEmbeddingBags(TABLES, optimizer=DEFAULT, plan=plans[0])
    for step in range(STEPS):
        bags.table_lr = DEFAULT.lr * lr_scale(step)
        with bags.clock.step(sampled="sampled" in how):
            bags(*ids_of(rank, step)).sin().mean().backward()
        if step + 1 < len(plans):
            bags.move_to(plans[step + 1])
    return {name: value.clone() for name, value in bags.own_tensors().items()}


def whole(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Weights by table, parts side by side."""
    parts: dict[str, dict[int, Tensor]] = {}
    for own in ranks:
        for key, value in own.items():
            name, _, tensor = key.rpartition(".")
            table, _, columns = name.partition("[")
            if tensor == "weight":
                parts.setdefault(table, {})[int(columns.partition(":")[0] or 0)] = value
    return {table: torch.cat([own[start] for start in sorted(own)], 1) for table, own in parts.items()}


def spread(world_size: int, first: int = 0) -> ShardingPlan:
    return ShardingPlan({name: (first + i) % world_size for i, name in enumerate(NAMES)}, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_table_trains_as_it_would_alone(world_size: int) -> None:
    expected = plain_loop(world_size)
    found = whole(run_ranks(our_loop, world_size, [spread(world_size)]))
    assert set(found) == set(NAMES)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-3 if weight.dtype == torch.float16 else 2e-6, rtol=1e-4)
    start = torch.empty(40, 8)
    initialise(start, "frozen", 0)
    assert torch.equal(found["frozen"], start)


def test_no_plan_and_no_move_changes_a_bit() -> None:
    expected = whole(run_ranks(our_loop, 2, [spread(2)]))
    split = {"sgd": ("sgd[0:4]", "sgd[4:8]"), "frozen": ("frozen[0:4]", "frozen[4:8]")}
    split["half_adagrad"] = ("half_adagrad[0:4]", "half_adagrad[4:8]")
    parts = {part: number for own in split.values() for number, part in enumerate(own)}
    rest = {name: 0 for name in NAMES if name not in split}
    in_parts, on_one = ShardingPlan({**rest, **parts}, 2), ShardingPlan(dict.fromkeys(NAMES, 1), 2)
    frozen_alone = ShardingPlan({**dict.fromkeys(NAMES, 0), "frozen": 1}, 2)
    for plans, how in [([on_one], ""), ([spread(2, 1), in_parts, on_one, frozen_alone], "sampled"), ([in_parts], "")]:
        found = whole(run_ranks(our_loop, 2, plans, how))
        assert all(torch.equal(found[name], expected[name]) for name in NAMES), (plans, how)


def tables_of_one_format(rank: int, world_size: int) -> tuple[int, dict[str, Tensor]]:
    tables = [replace(table, dtype="fp32", optimizer=None) for table in TABLES]
    bags = ShardedEmbeddingBags(tables, optimizer=DEFAULT)
    for step in range(STEPS):
        bags(*ids_of(rank, step)).sin().mean().backward()
    return len(bags.sharded.storage.lookups), {name: value.clone() for name, value in bags.own_tensors().items()}


def test_tables_of_one_format_are_one_lookup() -> None:
    assert [count for count, _ in run_ranks(tables_of_one_format, 2)] == [1, 1]


def saved_and_loaded(rank: int, world_size: int) -> list[bool]:
    bags = ShardedEmbeddingBags(TABLES, optimizer=DEFAULT)
    bags(*ids_of(rank, 0)).sin().mean().backward()
    saved = {name: value.clone() if isinstance(value, Tensor) else value for name, value in bags.state_dict().items()}
    other: Any = ShardedEmbeddingBags(TABLES, optimizer=DEFAULT, seed=7)
    other.load_state_dict(saved)
    for each in (bags, other):
        each(*ids_of(rank, 1)).sin().mean().backward()
    mine: Mapping[str, Tensor] = other.own_tensors()
    return [torch.equal(mine[name], value) for name, value in bags.own_tensors().items()]


def test_state_of_every_optimizer_is_saved_and_loaded() -> None:
    assert all(all(same) for same in run_ranks(saved_and_loaded, 2))
