"""Features that look up rows of one table: the same numbers as plain PyTorch, whatever the plan, and saved once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dlrm_autoshard as das
from dlrm_autoshard.config import TableOptimizerConfig, TablesConfig
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.data.features import Features, join
from dlrm_autoshard.data.resolve_tables import TableRows, resolve_tables
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.moves.reshard import reshard
from dlrm_autoshard.distributed.ranks.groups import new_group
from dlrm_autoshard.distributed.tables.init import initialise
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import Shard, TableConfig
from tests.jobs import said_by
from tests.ranks import run_ranks
from tests.small_embeddings import global_batch, own_tensors, train_step
from tests.trainers import config, losses, make_runtime, tensors, trainer

SHARED = {"item": ["bought", "clicked", "seen"]}
FEATURES = [
    TableConfig("bought", 60, 8), TableConfig("user", 900, 4), TableConfig("clicked", 60, 8),
    TableConfig("tag", 7, 16), TableConfig("seen", 60, 8), TableConfig("shop", 30, 8),
]  # fmt: skip
LEARNED = Features.of(FEATURES, SHARED)
PLANS = {
    1: [{"item": 0, "user": 0, "tag": 0, "shop": 0}, {"item[0:4]": 0, "item[4:8]": 0, "user": 0, "tag": 0, "shop": 0}],
    2: [
        {"item": 1, "user": 0, "tag": 1, "shop": 0},
        {"item[0:4]": 1, "item[4:8]": 0, "user": 1, "tag": 0, "shop": 0},
        {"item": 0, "user": 0, "tag": 0, "shop": 0},
    ],
    3: [{"item": 2, "user": 0, "tag": 0, "shop": 2}, {"item[0:4]": 0, "item[4:8]": 2, "user": 0, "tag": 0, "shop": 0}],
}


def embeddings_of(rank: int, plan: ShardingPlan, optimizer: str) -> ShardedEmbeddings:
    group = dist.group.WORLD
    assert group is not None
    how = TablesConfig(optimizer=TableOptimizerConfig(name=optimizer, lr=0.1, per_part=True))
    return ShardedEmbeddings(
        LEARNED, plan, how, rank=rank, group=group, id_group=new_group(), device=torch.device("cpu")
    )


def steps(rank: int, world_size: int, optimizer: str, plans: list[dict[str, int]]) -> dict[str, Tensor]:
    """Two steps under each plan, tables moved between."""
    found: dict[str, Tensor] = {}
    embeddings = embeddings_of(rank, ShardingPlan(plans[0], world_size), optimizer)
    for number, plan in enumerate(plans):
        if number:
            reshard(embeddings, ShardingPlan(plan, world_size), group=new_group())
        for step in range(2 * number, 2 * number + 2):
            found[f"pooled{step}"] = train_step(embeddings, global_batch(step, world_size, FEATURES)[rank])
    return found | own_tensors(embeddings)


def bags_of(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Of each feature its ids and offsets."""
    lengths = batch.lengths_TB.long()
    return list(zip(batch.values_N.long().split(lengths.sum(1).tolist()), lengths.cumsum(1) - lengths, strict=True))


def reference(world_size: int, optimizer: str, count: int) -> dict[str, Tensor]:
    """nn.functional.embedding_bag in one process, and the optimizers as their papers have them."""
    weights = {t.name: nn.Parameter(torch.empty(t.num_embeddings, t.embedding_dim)) for t in LEARNED.tables}
    sums: dict[str, Tensor | float] = dict.fromkeys(weights, 0.0)
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        with torch.no_grad():
            initialise(weight, name, 0)
    for step in range(count):
        pooled = []
        for batch in global_batch(step, world_size, FEATURES):
            bags = bags_of(batch)
            of_feature = [
                nn.functional.embedding_bag(ids, weights[LEARNED.tables[table].name], offsets, mode="sum")
                for (ids, offsets), table in zip(bags, LEARNED.table_of, strict=True)
            ]
            pooled.append(torch.cat([of_feature[i] for i in LEARNED.output_order()], 1))
        found[f"pooled{step}"] = torch.stack(pooled).detach()
        torch.cat(pooled).backward(torch.sin(torch.cat(pooled)).detach() / 10)
        for name, weight in weights.items():
            assert weight.grad is not None
            gradient, weight.grad = weight.grad, None
            with torch.no_grad():
                if optimizer == "sgd":
                    weight.sub_(0.1 * gradient)
                    continue
                squares = gradient**2
                sums[name] = sums[name] + (squares if optimizer == "adagrad" else squares.mean(1, keepdim=True))
                weight.sub_(0.1 * gradient / (sums[name] ** 0.5 + 1e-8))
    return found | {f"{name}.weight": weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_features_of_one_table_train_it_as_plain_pytorch_does(world_size: int, optimizer: str) -> None:
    """Under plans one after the other, tables whole and split, moved between steps."""
    plans = PLANS[world_size]
    if optimizer == "rowwise_adagrad":  # a split table is another optimizer then
        plans = [plan for plan in plans if "item" in plan]
    ranks = run_ranks(steps, world_size, optimizer, plans, timeout=90)
    expected = reference(world_size, optimizer, 2 * len(plans))
    for step in range(2 * len(plans)):
        pooled = torch.stack([rank[f"pooled{step}"] for rank in ranks])
        torch.testing.assert_close(pooled, expected[f"pooled{step}"], rtol=1e-5, atol=1e-6)
    weights = {key: value for rank in ranks for key, value in rank.items() if key.endswith(".weight")}
    assert {Shard(key.removesuffix(".weight")).table for key in weights} == {"item", "user", "tag", "shop"}
    for key, weight in weights.items():
        shard = Shard(key.removesuffix(".weight"))
        start, stop = shard.columns or (0, weight.shape[1])
        torch.testing.assert_close(weight, expected[f"{shard.table}.weight"][:, start:stop], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_no_plan_changes_a_bit(optimizer: str) -> None:
    seen = []
    for plan in PLANS[2] if optimizer != "rowwise_adagrad" else [PLANS[2][0], PLANS[2][2]]:
        ranks = run_ranks(steps, 2, optimizer, [plan])
        seen.append([rank[f"pooled{step}"] for rank in ranks for step in range(2)])
    assert all(torch.equal(one, first) for other in seen[1:] for one, first in zip(other, seen[0], strict=True))


@given(st.data())
def test_joined_ids_are_those_of_a_tables_features(data: st.DataObject) -> None:
    table_of = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    table_of = [sorted(set(table_of)).index(table) for table in table_of]
    lengths = np.array(data.draw(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2),
                                          min_size=len(table_of), max_size=len(table_of))))  # fmt: skip
    ids = np.arange(lengths.sum())
    of_feature = np.split(ids, lengths.sum(1).cumsum()[:-1])
    lengths_TB, joined = join(lengths, ids, table_of)
    parts = np.split(joined, lengths_TB.sum(1).cumsum()[:-1])
    for table, part in enumerate(parts):
        own = [feature for feature, other in enumerate(table_of) if other == table]
        assert sorted(part) == sorted(i for feature in own for i in of_feature[feature])
        assert (lengths_TB[table] == lengths[own].sum(0)).all()


def test_what_cannot_share_a_table_is_said() -> None:
    rows = [TableRows("bought", 60), TableRows("clicked", 60), TableRows("user", 9)]
    shared = TablesConfig(shared={"item": ["bought", "clicked"]}, embedding_dims={"item": 8})
    resolved = resolve_tables(rows, shared)
    assert [(t.name, t.num_embeddings, t.embedding_dim) for t in resolved] == [
        ("bought", 60, 8), ("clicked", 60, 8), ("user", 9, 16),
    ]  # fmt: skip
    assert [t.name for t in Features.of(resolved, shared.shared).tables] == ["item", "user"]
    for sharing, said in [
        ({"item": ["bought", "clickt"]}, "'clickt', which the data does not have. Did you mean 'clicked'"),
        ({"item": ["bought"], "other": ["bought"]}, "'bought' is in 'item' and in 'other'"),
        ({"user": ["bought", "clicked"]}, "'user' is already the name of a feature"),
    ]:
        with pytest.raises(DataError, match=said):
            resolve_tables(rows, TablesConfig(shared=sharing))
    with pytest.raises(DataError, match="'b' has 9 rows of 4, but an earlier feature of table 'x' 5 rows of 4"):
        Features.of([TableConfig("a", 5, 4), TableConfig("b", 9, 4)], {"x": ["a", "b"]})
    with pytest.raises(DataError, match="embedding_dims names a table 'bought'"):
        resolve_tables(rows, TablesConfig(shared={"item": ["bought", "clicked"]}, embedding_dims={"bought": 8}))


# As people use it ----------------------------------------------------------------------------------------------------

TABLES = [
    {"name": "user", "num_embeddings": 40, "embedding_dim": 8},
    {"name": "bought", "num_embeddings": 300, "embedding_dim": 8, "mean_pooling": 1.0},
    {"name": "tag", "num_embeddings": 9, "embedding_dim": 16, "mean_pooling": 0.5},
    {"name": "clicked", "num_embeddings": 300, "embedding_dim": 8, "mean_pooling": 6.0},
]
SETTINGS: dict[str, Any] = {
    "data": {"tables": TABLES, "train_samples": 320, "test_samples": 40},
    "tables": {"shared": {"item": ["bought", "clicked"]}, "optimizer": {"name": "adagrad", "lr": 0.1}},
    "checkpoint": {"enabled": True},
}


def jobs(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    """One that plans, measures and moves; one under a fixed plan; one in two starts."""
    runtime, found = make_runtime(rank, world_size), {}
    planned = {"enabled": True, "measure_plans": 2, "budget_seconds": 2.0, "reshard": {"every_steps": 5}}
    fixed = {"placement": str(folder / "plan.json")}
    for name, autoshard, last in [
        ("planned", planned, 30), ("fixed", fixed, 30), ("again", fixed, 12), ("again", planned, 30),
    ]:  # fmt: skip
        settings = config(folder, **SETTINGS, autoshard=autoshard, train={"epochs": 3, "max_steps": last})
        with trainer(settings, runtime, folder / name) as made:
            made.run()
            found[name] = tensors(made)
    return found


def test_a_job_plans_moves_saves_and_exports_a_shared_table_once(tmp_path: Path) -> None:
    plan = {"item": 1, "user": 0, "tag": 0}
    ShardingPlan(plan, 2).save(tmp_path / "plan.json")
    ranks = run_ranks(jobs, 2, tmp_path, timeout=150)
    weights = {name: merged([rank[name] for rank in ranks], "tables.item") for name in ranks[0]}
    assert weights["fixed"].shape == (300, 8)
    assert torch.equal(weights["planned"], weights["fixed"]) and torch.equal(weights["again"], weights["fixed"])
    assert losses(tmp_path / "planned") == losses(tmp_path / "fixed")
    run = tmp_path / "fixed"
    (run / "config.yaml").write_text(config(tmp_path, **SETTINGS, train={"epochs": 3, "max_steps": 30}).to_yaml())
    said_by("export", str(run), "--to", "numpy", "--out", str(tmp_path / "w.npz"))
    assert torch.equal(torch.from_numpy(np.load(tmp_path / "w.npz")["tables.item.weight"]), weights["fixed"])
    inputs = json.loads((tmp_path / "w.npz.json").read_text())
    assert [(t["name"], t.get("table")) for t in inputs["tables"]] == [
        ("user", None), ("bought", "item"), ("tag", None), ("clicked", "item"),
    ]  # fmt: skip
    pool = json.loads(said_by("tables", "--from-run", str(run), "--json"))
    [item] = [table for table in pool["tables"] if table["name"] == "item"]
    assert item["stats"]["features"] == 2 and item["stats"]["mean_pooling"] == pytest.approx(7, rel=0.1)


def merged(by_rank: list[dict[str, Tensor]], table: str) -> Tensor:
    """A table's weight, whole, from its parts."""
    parts = {k.removesuffix(".weight"): v for rank in by_rank for k, v in rank.items() if k.endswith(".weight")}
    own = {Shard(k): v for k, v in parts.items() if Shard(k).table == table}
    return torch.cat([own[shard] for shard in sorted(own, key=lambda shard: shard.columns or (0, 0))], 1)


@pytest.mark.filterwarnings("ignore:No complete tensor found:UserWarning")  # of torch.export, of itself
def test_the_exported_program_and_shared_out_predictions_are_the_models(tmp_path: Path) -> None:
    tables = [{"name": n, "num_embeddings": 50, "embedding_dim": 8, "mean_pooling": p} for n, p in [("a", 1), ("b", 3)]]
    tables.append({"name": "c", "num_embeddings": 9, "embedding_dim": 8, "mean_pooling": 1})
    settings = config(
        tmp_path / "runs", data={"tables": tables, "train_samples": 64, "test_samples": 30},
        tables={"shared": {"ab": ["a", "b"]}}, checkpoint={"enabled": True}, run={"name": "shared"},
    )  # fmt: skip
    (tmp_path / "shared.yaml").write_text(settings.to_yaml())
    started(tmp_path, "train", "shared.yaml", "--ranks=2")
    run = tmp_path / "runs/shared"
    said_by("predict", str(run), f"--out={tmp_path / 'one.npy'}")
    started(tmp_path, "predict", str(run), "--out=two.npy", "--ranks=2")
    said_by("export", str(run), f"--out={tmp_path / 'model.pt2'}")
    ours = np.load(tmp_path / "one.npy")
    assert np.allclose(ours, np.load(tmp_path / "two.npy"), atol=1e-6)
    from dlrm_autoshard.data.open import open_source

    batch = open_source(settings.data, settings.tables).read("test", 0, 0, 30)
    values, offsets = zip(*bags_of(batch), strict=True)
    model = torch.export.load(tmp_path / "model.pt2").module()
    assert np.allclose(model(batch.dense_BF, list(values), list(offsets)).detach().numpy(), ours, atol=1e-6)


def started(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "dlrm_autoshard", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def own_loop(rank: int, world_size: int, folder: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Pooled vectors of each step, by the ids' lengths and values; the ids as keys in another order give the same."""
    tables = [TableConfig("item", 60, 8), TableConfig("tag", 7, 16, "mean")]
    bags = das.ShardedEmbeddingBags(
        tables, optimizer=das.SGD(lr=0.1), features={"item": ["bought", "clicked"]},
        plan=ShardingPlan({"item": 1, "tag": 0}, 2),
    )  # fmt: skip
    autoshard = das.Autoshard(bags, every_steps=3, sample_every=1, run_dir=folder, budget_seconds=1.0)
    order, found = [FEATURES[0], FEATURES[2], FEATURES[3]], []
    for step in range(6):
        batch = global_batch(step, world_size, order)[rank]
        pooled = bags(batch.lengths_TB, batch.values_N)
        assert set(bags.split(pooled)) == {"bought", "clicked", "tag"}
        pooled.square().sum().backward()
        autoshard.step()
        found.append(pooled.detach().clone())
    return found, bags.own_tensors()


def test_a_loop_of_ones_own_shares_tables_too(tmp_path: Path) -> None:
    ranks = run_ranks(own_loop, 2, tmp_path, timeout=90)
    item, tag = torch.empty(60, 8), torch.empty(7, 16)
    initialise(item, "item", 0)
    initialise(tag, "tag", 0)
    order = [FEATURES[0], FEATURES[2], FEATURES[3]]
    for step in range(6):
        weights = nn.Parameter(item), nn.Parameter(tag)
        for rank, batch in enumerate(global_batch(step, 2, order)):
            (bought, clicked, tagged) = (
                nn.functional.embedding_bag(ids, weight, offsets, mode=mode)
                for (ids, offsets), weight, mode in zip(
                    bags_of(batch), (weights[0], weights[0], weights[1]), ("sum", "sum", "mean"), strict=True
                )
            )
            pooled = torch.cat([bought, clicked, tagged], 1)
            torch.testing.assert_close(pooled.detach(), ranks[rank][0][step], rtol=1e-5, atol=1e-6)
            (pooled.square().sum() / 2).backward()
        item, tag = (weight.detach() - 0.1 * weight.grad for weight in weights)  # type: ignore[operator]
    saved = {name: value for _, own in ranks for name, value in own.items()}
    torch.testing.assert_close(saved["item.weight"], item, rtol=1e-5, atol=1e-6)
