"""A model finds its columns by their names: a config that lists tables, dense columns or labels in another order, as
any tool that sorts lists makes of it, is of the same model; one that has other columns is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from dlrm_autoshard.commands.main import main
from dlrm_autoshard.config import Config, parse_config
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.columns import Columns, in_order
from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.tables import TableConfig
from dlrm_autoshard.training.checkpoints.manifest import CheckpointError, DamagedCheckpoint, read_manifest
from tests import trainers
from tests.jobs import said_by
from tests.ranks import run_ranks
from tests.trainers import make_runtime, records, tensors, trainer

TABLES: list[dict[str, Any]] = [
    {"column": "user", "num_embeddings": 30, "weights": "user_w"},
    {"column": "item", "num_embeddings": 30},
    {"column": "seen", "num_embeddings": 30},
    {"column": "shop", "num_embeddings": 30},
]
LABELS, DENSE = {"click": 1.0, "buy": 2.0}, ["x", "price", "age"]
OTHERWISE: dict[str, Any] = {
    "data.tables": [TABLES[place] for place in (2, 3, 0, 1)],
    "data.dense": ["age", "x", "price"],
    "data.labels": {"buy": 2.0, "click": 1.0},
}


def files(folder: Path) -> None:
    """Labels that depend on each column in another way, and bags of several ids with weights."""
    for number, name in enumerate(("train", "val", "test")):
        draw, rows = np.random.default_rng(number), 600 if name == "train" else 200
        ids = {table["column"]: draw.integers(0, 30, rows) for table in TABLES}
        dense = {column: draw.normal(size=rows) for column in [*DENSE, "extra"]}
        click = (ids["user"] % 2) + (dense["x"] > 0) + (ids["seen"] % 3 == 0) >= 2
        buy = (ids["item"] % 3 == 0) | (dense["price"] > 1)
        bags = {"user": pa.array([[int(one), int(one + 1) % 30] for one in ids["user"]])}
        weights = {"user_w": pa.array([[0.5, 1.5]] * rows)}
        columns = {**ids, **dense, **bags, **weights, "click": click.astype(int), "buy": buy.astype(int)}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")


def settings(folder: Path, interaction: str = "cat", **changes: Any) -> Config:
    record: dict[str, Any] = {
        "run": {"device": "cpu", "pin_cores": False, "dir": str(folder)},
        "data": {
            "source": "parquet", "labels": LABELS, "dense": DENSE, "tables": TABLES,
            **{split: [str(folder / f"{split}.parquet")] for split in ("train", "val", "test")},
        },
        "tables": {
            "embedding_dim": 8, "embedding_dims": {"item": 4}, "optimizer": {"name": "adagrad", "lr": 0.1},
            "shared": {"things": ["seen", "shop"]},
        },
        "model": {"dense_arch_layer_sizes": [12, 8], "over_arch_layer_sizes": [16, 1], "interaction": interaction,
                  "dcn_low_rank_dim": 4},
        "dense_optimizer": {"name": "adagrad", "lr": 0.05},
        "train": {"batch_size": 32, "epochs": 2, "log_every_steps": 1},
        "profile": {"enabled": False},
    }  # fmt: skip
    for key, value in changes.items():
        section, name = key.split(".")
        record[section] = {**record[section], name: value}
    return parse_config(record)


def train(
    rank: int, world_size: int, runs: dict[str, tuple[Config, Config]], folder: Path
) -> dict[str, dict[str, Tensor]]:
    """Each run's tensors: one epoch by the first config, another one by the second."""
    runtime, found = make_runtime(rank, world_size), {}
    for name, (first, second) in runs.items():
        for config in (first.model_copy(update={"train": first.train.model_copy(update={"epochs": 1})}), second):
            with trainer(config, runtime, folder / name) as made:
                made.run()
                found[name] = tensors(made)
        if rank == 0:
            (folder / name / "config.yaml").write_text(first.to_yaml())
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of each interaction on two ranks, resumed as they were and with everything in another order."""
    folder = tmp_path_factory.mktemp("ordered")
    files(folder)
    runs = {}
    for interaction in ("cat", "dot", "dcn"):
        plain = settings(folder, interaction)
        runs[f"{interaction} as it was"] = (plain, plain)
        runs[f"{interaction} otherwise"] = (plain, settings(folder, interaction, **OTHERWISE))
    by_rank = run_ranks(train, 2, runs, folder, timeout=150)
    for interaction in ("cat", "dot", "dcn"):
        for own in by_rank:
            plain, other = own[f"{interaction} as it was"], own[f"{interaction} otherwise"]
            assert plain.keys() == other.keys() and len(plain) > 5
            assert all(torch.equal(plain[name], other[name]) for name in plain), "resumed bit by bit"
    return folder


@pytest.mark.parametrize("interaction", ["cat", "dot", "dcn"])
def test_a_run_that_is_resumed_in_another_order_goes_on_as_it_was(interaction: str, trained: Path) -> None:
    def told(name: str) -> list[dict[str, Any]]:
        lines, timed = records(trained / f"{interaction} {name}"), ("throughput", "step_ms", "examples_per_second")
        return [{key: value for key, value in line.items() if key not in timed} for line in lines]

    assert told("as it was") == told("otherwise")
    assert told("as it was")[-1]["auc.click"] != told("as it was")[-1]["auc.buy"]


def overrides(*keys: str) -> list[str]:
    return [f"{key}={json.dumps(OTHERWISE[key])}" for key in keys]


ORDERS = [("data.tables",), ("data.dense",), ("data.labels",), tuple(OTHERWISE)]


@pytest.mark.parametrize("keys", ORDERS, ids=" ".join)
def test_it_is_evaluated_and_predicts_as_it_was(keys: tuple[str, ...], trained: Path, tmp_path: Path) -> None:
    run, changed = str(trained / "cat as it was"), overrides(*keys)
    assert json.loads(said_by("evaluate", run, "--json", *changed)) == json.loads(said_by("evaluate", run, "--json"))
    said = [said_by("predict", run, "--out", str(tmp_path / name), *more) for name, more in (("a", []), ("b", changed))]
    np.testing.assert_array_equal(np.load(tmp_path / "a"), np.load(tmp_path / "b"))
    assert all("of click, buy" in one for one in said), "columns of what is predicted are named"


@pytest.mark.parametrize(
    "change, says",
    [
        (
            {"data.dense": ["x", "price"]},
            r"other dense columns: 'x', 'price', 'age', .* has 'x', 'price' \('age' is missing",
        ),
        ({"data.dense": ["x", "price", "extra"]}, r"'age' is missing, 'extra' is new"),
        (
            {"data.tables": TABLES[1:]},
            r"tables.shared|other features .*: 'user', 'item', 'seen', 'shop', .*'user' is missing",
        ),
        ({"data.labels": {"buy": 1.0}}, r"other labels: 'click', 'buy', .* has 'buy' \('click' is missing\)"),
    ],
    ids=str,
)
def test_other_columns_are_refused_naming_both_orders(
    change: dict[str, Any], says: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{key}={json.dumps(value)}" for key, value in change.items()]
    assert main(["evaluate", str(trained / "cat as it was"), *words]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_features_that_look_up_another_table_are_refused(trained: Path) -> None:
    other: dict[str, Any] = {"tables.shared": {"things": ["seen", "user"]}}
    shared = settings(trained, **other)
    source, was = (open_source(one.data, one.tables) for one in (shared, settings(trained)))
    wanted = Columns.of(was, settings(trained).tables.shared)
    with pytest.raises(DataError, match=r"looks up 'user' in table 'user', but tables.shared says 'things'"):
        in_order(source, wanted, shared.tables.shared, "checkpoint 'c'")


class Odd:
    """A custom source whose dense columns have no names."""

    def __init__(self, names: str) -> None:
        self.tables = tuple(TableConfig(name, 10, 4) for name in names)
        self.num_dense, self.parallel_reads = 1, True
        self.reuse_batches: int | None = None

    def num_samples(self, split: str) -> int:
        return 8

    def read(self, split: str, epoch: int, first: int, last: int) -> Batch:
        size, count = last - first, len(self.tables)
        lengths = torch.tensor([ord(table.name) % 3 for table in self.tables], dtype=torch.int32)
        values = torch.cat(
            [torch.full((size * int(n),), ord(t.name) % 10) for t, n in zip(self.tables, lengths, strict=True)]
        )
        dense, labels = torch.zeros(size, 1), torch.zeros(size)
        return Batch(dense, lengths[:, None].expand(count, size).contiguous(), values, labels, size, size)


def test_a_custom_source_is_put_in_order_too() -> None:
    wanted = Columns.of(Odd("abc"), {})
    there = in_order(Odd("cab"), wanted, {}, "the model")
    one, other = there.read("train", 0, 0, 5), Odd("abc").read("train", 0, 0, 5)
    assert [table.name for table in there.tables] == ["a", "b", "c"] and Columns.of(there, {}) == wanted
    assert torch.equal(one.values_N, other.values_N) and torch.equal(one.lengths_TB, other.lengths_TB)
    assert there.parallel_reads and not hasattr(there, "place")  # type: ignore[attr-defined]
    named = Odd("abc")
    named.dense_names = ("x",)  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"dense columns: columns without names, .* the data has 'x'"):
        in_order(named, wanted, {}, "the model")


def test_what_is_wrong_with_a_batch_is_left_for_whoever_checks_it() -> None:
    broken = Odd("cab")
    read = broken.read
    broken.read = lambda *place: Batch(**{**vars(read(*place)), "values_N": torch.zeros(1)})  # type: ignore[method-assign]
    there = in_order(broken, Columns.of(Odd("abc"), {}), {}, "the model")
    assert there.read("train", 0, 0, 5).values_N.shape == (1,)


def test_synthetic_tables_are_put_in_order_by_name() -> None:
    plain = trainers.config(data={"num_dense": 2})
    sorted_tables = sorted(plain.data.model_dump()["tables"], key=lambda table: str(table["name"]))
    other = trainers.config(data={"num_dense": 2, "tables": sorted_tables})
    first, second = (open_source(one.data, one.tables) for one in (plain, other))
    there = in_order(second, Columns.of(first, {}), {}, "the model")
    one, two = first.read("train", 1, 3, 40), there.read("train", 1, 3, 40)
    assert vars(one).keys() == vars(two).keys()
    for name, value in vars(one).items():
        assert torch.equal(value, vars(two)[name]) if isinstance(value, Tensor) else value == vars(two)[name], name


def test_a_checkpoint_of_before_columns_were_named_is_told_from_damage(trained: Path, tmp_path: Path) -> None:
    newest = max((trained / "cat as it was" / "checkpoints").glob("step_*"))
    old = tmp_path / newest.name
    old.mkdir()
    record = json.loads((newest / "manifest.json").read_text())
    (old / "manifest.json").write_text(json.dumps({**record, "schema": 3}))
    with pytest.raises(CheckpointError, match="the order of") as caught:
        read_manifest(old)
    assert not isinstance(caught.value, DamagedCheckpoint) and isinstance(caught.value, UserError)
