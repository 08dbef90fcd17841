"""Tables with dtypes, optimizers and learning rates of their own train as each would alone, under every plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

import dlrm_autoshard
from dlrm_autoshard.config import TablesConfig, parse_sections
from dlrm_autoshard.data.resolve_tables import TableRows, resolve_tables
from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.tables.init import initialise
from dlrm_autoshard.distributed.tables.optimizers import SGD, Adagrad, Frozen, RowwiseAdagrad
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.optimizers import TableOptimizerConfig
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig, TableInit
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


def pooled_from_files(rank: int, world_size: int, tables: list[TableConfig], plans: list[ShardingPlan]) -> list[Any]:
    found: list[Any] = []
    for plan in plans:
        bags = ShardedEmbeddingBags(tables, optimizer=Adagrad(), plan=plan)
        found.append({name: value.clone() for name, value in bags.own_tensors().items()})
    return found


def test_a_table_starts_from_a_file_under_every_plan(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    values = {name: generator.standard_normal((50, 8)).astype(np.float32) for name in ("npy", "lists", "columns")}
    np.save(tmp_path / "npy.npy", values["npy"].astype(np.float64))
    rows = pa.FixedSizeListArray.from_arrays(pa.array(values["lists"].ravel()), 8)
    pq.write_table(pa.table({"embedding": rows}), tmp_path / "lists.parquet", row_group_size=7)
    columns = {f"d{i}": values["columns"][:, i] for i in range(8)}
    pq.write_table(pa.table(columns), tmp_path / "columns.parquet", row_group_size=20)
    endings = {"npy": "npy", "lists": "parquet", "columns": "parquet"}
    tables = [
        TableConfig(name, 50, 8, init=TableInit(file=str(tmp_path / f"{name}.{ending}")))
        for name, ending in endings.items()
    ]
    tables += [TableConfig("normal", 5000, 8, init=TableInit(normal=0.1))]
    tables += [TableConfig("uniform", 5000, 8, init=TableInit(uniform=0.3))]
    names = [table.name for table in tables]
    whole_plan = ShardingPlan({name: i % 2 for i, name in enumerate(names)}, 2)
    halves = {f"{name}[{a}:{a + 4}]": a // 4 for name in names for a in (0, 4)}
    ranks = run_ranks(pooled_from_files, 2, tables, [whole_plan, ShardingPlan(halves, 2)])
    one, other = (whole([own[i] for own in ranks]) for i in (0, 1))
    for name in names:
        assert torch.equal(one[name], other[name])
    for name, expected in values.items():
        assert torch.equal(one[name], torch.from_numpy(expected))
    assert float(one["normal"].std()) == pytest.approx(0.1, rel=0.02) and float(one["normal"].abs().max()) > 0.3
    assert float(one["uniform"].abs().max()) == pytest.approx(0.3, rel=0.01)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (
            "wide.npy",
            "has 50 x 12 numbers, but table 'item', which starts from it, has 50 rows of 8. Give a file of that",
        ),
        ("long.npy", "has 60 x 8 numbers"),
        ("whole.npy", "it holds int64; it must hold float16"),
        ("lacking.npy", "No such file"),
        ("text.csv", "its name must end in .npy or .parquet"),
        ("torn.npy", "cannot be read from"),
        ("torn.parquet", "cannot be read from"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_a_sentence(file: str, said: str, tmp_path: Path) -> None:
    for name, array in {"wide": np.ones((50, 12)), "long": np.ones((60, 8)), "whole": np.ones((50, 8), int)}.items():
        np.save(tmp_path / f"{name}.npy", array)
    for name in ("torn.npy", "torn.parquet", "text.csv"):
        (tmp_path / name).write_text("no numbers")
    with pytest.raises(UserError) as caught:
        ShardedEmbeddingBags([TableConfig("item", 50, 8, init=TableInit(file=str(tmp_path / file)))])
    assert said in str(caught.value) and "item" in str(caught.value)


def test_what_the_page_names_is_public() -> None:
    assert dlrm_autoshard.Frozen() == Frozen() and dlrm_autoshard.TableInit(normal=0.1) == TableInit(normal=0.1)


PER_TABLE = {
    "user": {"dim": 12, "dtype": "fp16", "optimizer": {"name": "sgd"}, "lr": 0.5},
    "item": {"lr": 0.01, "pooling": "mean"},
}


def test_settings_of_a_table_are_resolved() -> None:
    rows = [TableRows("user", 10), TableRows("item", 20, 32), TableRows("day", 7)]
    tables = TablesConfig.model_validate({"optimizer": {"lr": 0.1, "eps": 1e-4}, "per_table": PER_TABLE})
    user, item, day = resolve_tables(rows, tables)
    own = TableOptimizerConfig(name="sgd", lr=0.5, eps=1e-4)
    assert user == TableConfig("user", 10, 12, dtype="fp16", optimizer=own)
    assert item == TableConfig("item", 20, 32, "mean", optimizer=TableOptimizerConfig(lr=0.01, eps=1e-4))
    assert day == TableConfig("day", 7, 16)
    assert all(TableConfig.from_json(table.to_json()) == table for table in (user, item, day))
    with pytest.raises(UserError, match=r"tables.per_table names a table 'usr', .* Did you mean 'user'\?"):
        resolve_tables(rows, TablesConfig.model_validate({"per_table": {"usr": {"dim": 8}}}))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"dtpye": "fp16"}, "unknown key 'tables.per_table.item.dtpye'. Did you mean 'tables.per_table.item.dtype'?"),
        ({"dim": 7}, "tables.per_table.item.dim is 7; fbgemm needs a multiple of 4 (try 8)"),
        ({"dtype": "fp8"}, "'tables.per_table.item.dtype' is 'fp8'; it must be one of fp32, fp16."),
        ({"frozen": True, "lr": 0.1}, "tables.per_table.item is frozen, but has tables.per_table.item.lr: leave one"),
        ({"frozen": True, "optimizer": {"name": "sgd"}}, "has tables.per_table.item.optimizer: leave one of them out"),
        ({"lr": 0.1, "optimizer": {"lr": 0.2}}, "tables.per_table.item has lr and optimizer.lr: leave one out"),
        ({"optimizer": "sgd"}, "'tables.per_table.item.optimizer' is 'sgd'; it is a section."),
        (
            {"init": {"file": "a.npy", "normal": 1.0}},
            "a table's init has file and normal; give it one",
        ),
        ({"init": {"xavier": 1.0}}, "unknown key 'tables.per_table.item.init.xavier'"),
        ({"dim": 8, "weight_decay": 0.1}, "unknown key 'tables.per_table.item.weight_decay'"),
    ],
)
def test_a_wrong_setting_of_a_table_is_said(own: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_sections(tables={"per_table": {"item": own}})
    assert said in str(caught.value), caught.value


def test_two_settings_of_one_thing_are_refused() -> None:
    with pytest.raises(UserError, match=r"tables.per_table.item.dim and tables.embedding_dims.item set the same"):
        parse_sections(tables={"embedding_dims": {"item": 8}, "per_table": {"item": {"dim": 16}}})
