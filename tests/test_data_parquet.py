"""Parquet files: every row once whatever the ranks and row groups, resumed in mid-epoch bit by bit, several labels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard.commands.main import main
from dlrm_autoshard.config import Config, TablesConfig, load_config
from dlrm_autoshard.config_data import ParquetData
from dlrm_autoshard.data.batch import Batch, DataError
from dlrm_autoshard.data.loader import Loader
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.data.sources.parquet import ParquetSource
from tests.jobs import said_by
from tests.ranks import run_ranks
from tests.trainers import make_runtime, trainer

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet")
CONFIG = Path(__file__).parents[1] / "configs" / "parquet.yaml"


def rows(count: int, seed: int = 0) -> dict[str, Any]:
    """As the shipped config has them; `age` numbers the rows, `price` is null now and then."""
    draw = np.random.default_rng(seed)
    histories = [draw.integers(0, 50000, draw.integers(0, 4)).tolist() for _ in range(count)]
    countries = np.array(["nz", "fiji", "chile"])[draw.integers(0, 3, count)]
    click = draw.random(count) < np.where(countries == "nz", 0.9, 0.1)
    return {
        "click": pa.array(click),
        "buy": pa.array((click & (draw.random(count) < 0.5)).astype(np.int8)),
        "weight": pa.array(draw.random(count)),
        "age": pa.array(np.arange(count) + 1000 * seed, pa.float64()),
        "price": pa.array([None if n % 7 == 0 else n / 10 for n in range(count)], pa.float32()),
        "user": pa.array(draw.integers(-(2**60), 2**60, count)),
        "country": pa.array([None if n % 11 == 0 else c for n, c in enumerate(countries.tolist())]).dictionary_encode(),
        "hour": pa.array(draw.integers(0, 24, count).astype(np.uint8)),
        "history": pa.array([None if n % 5 == 0 else ids for n, ids in enumerate(histories)], pa.list_(pa.int64())),
        "history_weight": pa.array([None if n % 5 == 0 else [0.5] * len(ids) for n, ids in enumerate(histories)]),
    }


def write(path: Path, count: int, seed: int = 0, group: int = 10) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(rows(count, seed)), path, row_group_size=group)


def shipped(folder: Path, *changes: str) -> Any:
    paths = [f"data.{split}=['{folder}/{pattern}']" for split, pattern in
             (("train", "day_*.parquet"), ("val", "val.parquet"), ("test", "test.parquet"))]  # fmt: skip
    return load_config(CONFIG, [*paths, *changes])


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    for name, count, seed in (("day_0", 37, 0), ("day_1", 25, 1), ("val", 20, 2), ("test", 20, 3)):
        write(folder / f"{name}.parquet", count, seed)
    return folder


def opened(folder: Path, *changes: str) -> ParquetSource:
    config = shipped(folder, *changes)
    assert isinstance(config.data, ParquetData)
    return ParquetSource(config.data, config.tables)


def ids_of(batch: Batch) -> list[list[list[int]]]:
    """By table and sample."""
    bags = iter(torch.split(batch.values_N, batch.lengths_TB.flatten().tolist()))
    return [[next(bags).tolist() for _ in range(batch.padded_size)] for _ in batch.lengths_TB]


def test_columns_are_what_the_config_calls_them(clicks: Path) -> None:
    source, given_ = opened(clicks, "data.shuffle=false"), rows(37)
    batch = source.read("train", 0, 0, 37)
    assert (source.num_dense, source.label_names) == (2, ("click", "buy"))
    prices = [price or 0 for price in given_["price"].to_pylist()]
    assert torch.allclose(batch.dense_BF, torch.tensor([given_["age"].to_pylist(), prices]).T)
    assert batch.labels_B.tolist() == [
        [float(a), float(b)] for a, b in zip(given_["click"].to_pylist(), given_["buy"].to_pylist(), strict=True)
    ]
    weights = torch.tensor(given_["weight"].to_pylist())
    assert batch.loss_weights_B is not None and torch.allclose(
        batch.loss_weights_B, torch.stack([weights, weights / 2], 1)
    )
    users, countries, hours, histories = ids_of(batch)
    assert all(len(ids) == 1 and 0 <= ids[0] < 100000 for ids in users) and len({ids[0] for ids in users}) == 37
    assert countries == [
        [] if name is None else [xxhash.xxh3_64_intdigest(name.encode()) % 1000]
        for name in given_["country"].to_pylist()
    ]
    assert hours == [[hour] for hour in given_["hour"].to_pylist()]
    assert histories == [ids or [] for ids in given_["history"].to_pylist()]
    assert batch.weights_N is not None and batch.weights_N.tolist() == [
        *[1.0] * sum(map(len, users + countries + hours)), *[0.5] * sum(map(len, histories))
    ]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(batch_size=st.integers(1, 20), world_size=st.integers(1, 3), groups=st.integers(1, 9), epoch=st.integers(0, 3))
def test_each_row_is_read_once_in_an_order_that_only_seed_and_epoch_decide(
    clicks: Path, batch_size: int, world_size: int, groups: int, epoch: int
) -> None:
    source = opened(clicks, f"data.shuffle_row_groups={groups}")
    ranks = [list(Loader(source, "train", epoch, batch_size, rank, world_size)) for rank in range(world_size)]
    ages = [
        age for step in zip(*ranks, strict=True) for batch in step for age in batch.dense_BF[: batch.size, 0].tolist()
    ]
    assert sorted(ages) == sorted([*range(37), *range(1000, 1025)])
    again = opened(clicks, f"data.shuffle_row_groups={groups}").read("train", epoch, 0, 62)
    assert again.dense_BF[:, 0].tolist() == ages
    assert source.read("train", epoch + 1, 0, 62).dense_BF[:, 0].tolist() != ages
    middle = source.read("train", epoch, 17, 41)
    assert middle.dense_BF[:, 0].tolist() == ages[17:41] and ids_of(middle)[3] == ids_of(again)[3][17:41]
    assert source.read("test", epoch, 0, 20).dense_BF[:, 0].tolist() == [*range(3000, 3020)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.dense=[agee]", "has no column 'agee'. Did you mean 'age'?"),
        ("data.dense=[mass, size]", "has no columns 'mass', 'size'. It has 'age', "),
        ("data.dense=[country]", "column 'country' holds dictionary"),
        ("data.labels={age: 1}; data.dense=[price]", "row 2: label 'age' is 2; it must be 0 or 1"),
        (
            "data.tables=[{column: history, num_embeddings: 9, weights: user}]",
            "has other lengths than 'history'",
        ),
        ("data.tables=[{column: price, num_embeddings: 9}]", "row 1: 'price' is 0.1: ids are whole numbers"),
        ("data.train=[nowhere.parquet]", "there is no file 'nowhere.parquet'"),
        ("tables.pooling=mean", "ids with weights are summed"),
        ("tables.poolings={history: mean}", "the pooling of 'history' is mean"),
    ],
)
def test_what_is_wrong_is_named(change: str, said: str, clicks: Path) -> None:
    with pytest.raises(DataError) as caught:
        opened(clicks, "data.shuffle=false", *change.split("; ")).read("train", 0, 0, 4)
    assert said in str(caught.value)


def test_rows_without_a_label_or_a_weight_are_refused(tmp_path: Path) -> None:
    columns = {
        "click": pa.array([0, 1, 1, None, 0, None], pa.int8()),
        "weight": pa.array([1, None, 1, 1, 1, 1], pa.float32()),
        "age": pa.array([1, None, 3, 4, 5, 6], pa.float32()),
        "user": pa.array([0, 1, 2, None, 4, 5]),
    }
    pq.write_table(pa.table(columns), tmp_path / "day.parquet", row_group_size=3)
    data = {
        "source": "parquet", "train": [f"{tmp_path}/day.parquet"], "labels": {"click": 1}, "dense": ["age"],
        "tables": [{"column": "user", "num_embeddings": 9}], "shuffle": False,
    }  # fmt: skip

    def read(first: int, last: int, **keys: object) -> Batch:
        return ParquetSource(ParquetData.model_validate(data | keys), TablesConfig()).read("train", 0, first, last)

    assert read(0, 3).dense_BF[:, 0].tolist() == [1, 0, 3]
    with pytest.raises(DataError, match=r"row group 1', row 0: 'click' is null, as in 2 of 3 rows\. Leave .* out"):
        read(3, 4)
    with pytest.raises(DataError, match=r"row group 0', row 1: 'weight' is null, as in 1 of 3 rows\. Leave .* out"):
        read(0, 3, sample_weight="weight")


@pytest.mark.parametrize("column", ["dense", "weight"])
def test_numbers_that_are_none_are_found_wherever_shuffling_put_them(tmp_path: Path, column: str) -> None:
    columns = {
        "click": pa.array([0] * 60), "age": pa.array(np.zeros(60), pa.float64()),
        "items": pa.array([[1, 2]] * 60), "by": pa.array([[1.0, 2.0]] * 60),
    }  # fmt: skip
    if column == "dense":
        columns["age"] = pa.array([0.0] * 47 + [float("inf")] + [0.0] * 12, from_pandas=False)
    else:
        columns["by"] = pa.array([[1.0, 2.0]] * 47 + [[1.0, float("inf")]] + [[1.0, 2.0]] * 12)
    pq.write_table(pa.table(columns), tmp_path / "day.parquet", row_group_size=20)
    data = ParquetData.model_validate(
        {
            "source": "parquet", "train": [f"{tmp_path}/day.parquet"], "labels": {"click": 1}, "dense": ["age"],
            "tables": [{"column": "items", "num_embeddings": 9, "weights": "by"}],
        }
    )  # fmt: skip
    source = ParquetSource(data, TablesConfig())
    what = r"dense feature 0 \(from 0\)" if column == "dense" else r"a weight of table 0's ids \(from 0\)"
    for epoch in range(3):
        with (
            pytest.raises(DataError, match=rf"{what} that is inf: row 7 \(from 0\) of '.*day\.parquet', row group 2\."),
            Loader(source, "train", epoch, 16, 0, 1) as loader,
        ):
            list(loader)
        with Loader(source, "train", epoch, 16, 0, 1, finite=False) as loader:
            assert len(list(loader)) == 4


def test_files_without_a_row_are_nothing_to_train_on(tmp_path: Path) -> None:
    pq.write_table(pa.table(rows(5)).slice(0, 0), tmp_path / "day_0.parquet")
    for split in ("val", "test"):
        write(tmp_path / f"{split}.parquet", 3)
    config = shipped(tmp_path)
    with pytest.raises(DataError, match=r"data\.source 'parquet' has no samples .* nothing to train on"):
        open_source(config.data, config.tables)


def test_what_is_trained_on_is_not_tested_on(tmp_path: Path) -> None:
    for name in ("day_0", "day_1"):
        write(tmp_path / f"{name}.parquet", 5)
    (tmp_path / "day_2.parquet").symlink_to(tmp_path / "day_0.parquet")
    every, first, link = (f"{tmp_path}/day_{day}.parquet" for day in ("*", "0", "2"))
    data = shipped(tmp_path).data
    for split, files, said in (
        ("test", [link], rf"data\.train and data\.test both name '{link}': metrics would cover samples that were"),
        ("val", [first], rf"data\.train and data\.val both name '{first}'"),
    ):
        asked = data.model_copy(update={"train": [first], "val": [], "test": [], split: files})
        with pytest.raises(DataError, match=said):
            open_source(asked, TablesConfig())
    twice = data.model_copy(update={"train": [every], "val": [], "test": []})
    with pytest.raises(DataError, match=rf"data\.train names '{link}' twice"):
        open_source(twice, TablesConfig())


def test_predictions_need_no_labels_and_other_files_need_no_training_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("day_0", 0), ("test", 1)):
        write(tmp_path / f"data/{name}.parquet", 400, seed, group=100)
    files = [
        f"data.{split}=[data/{name}.parquet]" for split, name in (("train", "day_0"), ("val", "test"), ("test", "test"))
    ]

    def dlrm(*arguments: str) -> str:
        """In this process: most commands take less time than importing torch."""
        status = main(arguments)
        return f"{status} {''.join(capfd.readouterr())}"

    assert dlrm("train", "parquet", "--ranks=1", "train.batch_size=100", *files).startswith("0 ")
    assert dlrm("predict", "runs/parquet", "--out", "labelled.npy").startswith("0 ")
    write(tmp_path / "data/test.parquet", 400, 0, group=150)
    for split in ("train", "test"):
        assert dlrm("predict", "runs/parquet", "--split", split, "--out", f"{split}.npy").startswith("0 ")
    assert np.array_equal(np.load(tmp_path / "train.npy"), np.load(tmp_path / "test.npy")), "in the files' order"
    without = pa.table(rows(400, 1)).drop_columns(["click", "buy", "weight"])
    nulls = without
    for column in ("click", "buy", "weight"):
        nulls = nulls.append_column(column, pa.nulls(400, pa.float64()))
    for unlabelled, says in ((without, "has no column"), (nulls, "is null, as in 100 of 100 rows")):
        pq.write_table(unlabelled, tmp_path / "data/test.parquet", row_group_size=100)
        assert dlrm("predict", "runs/parquet", "--out", "new/bare.npy").startswith("0 400 predictions")
        predicted = np.load(tmp_path / "new/bare.npy")
        assert predicted.shape == (400, 2) and np.array_equal(predicted, np.load(tmp_path / "labelled.npy"))
        said = dlrm("evaluate", "runs/parquet")
        assert said.startswith("2 ") and says in said
    (tmp_path / "data/test.parquet").rename(tmp_path / "new.parquet")
    (tmp_path / "data/day_0.parquet").unlink()
    assert "there is no file" in dlrm("predict", "runs/parquet", "--out", "new.npy")
    other = ("--out", "new.npy", "data.test=[new.parquet]")
    assert dlrm("predict", "runs/parquet", *other).startswith("0 400 predictions")
    assert np.array_equal(np.load(tmp_path / "new.npy"), np.load(tmp_path / "labelled.npy"))
    assert dlrm("export", "runs/parquet", "--out", "model.npz", "--to", "numpy").startswith("0 ")
    described = json.loads((tmp_path / "model.npz.json").read_text())
    assert described["probabilities_of"] == ["click", "buy"] and described["id_weights"]
    assert [table["name"] for table in described["tables"]] == ["user", "country", "hour", "history"]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "day_0.parquet", 30)
    (tmp_path / "day_0.parquet").write_bytes((tmp_path / "day_0.parquet").read_bytes()[:-9])
    data = ParquetData.model_validate(
        {
            "source": "parquet", "train": [f"{tmp_path}/day_0.parquet"], "labels": {"click": 1},
            "tables": [{"column": "hour", "num_embeddings": 24}],
        }
    )  # fmt: skip
    with pytest.raises(DataError, match=r"day_0\.parquet' cannot be read as parquet"):
        ParquetSource(data, TablesConfig())


def train_in_pieces(rank: int, world_size: int, run_dir: Path, whole: Config) -> None:
    runtime = make_runtime(rank, world_size)
    for stop in (13, None):
        piece = whole.model_copy(update={"train": whole.train.model_copy(update={"max_steps": stop})})
        with trainer(piece, runtime, run_dir) as made:
            made.run()


@pytest.mark.filterwarnings("ignore:No complete tensor found:UserWarning")  # of torch.export, of itself
def test_two_tasks_train_resume_evaluate_predict_and_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count, seed in (("day_0", 3000, 0), ("day_1", 1000, 1), ("val", 500, 2), ("test", 500, 3)):
        write(tmp_path / "data" / "clicks" / f"{name}.parquet", count, seed, group=400)
    small = ("train.batch_size=100", "train.epochs=2", "autoshard.enabled=false", "checkpoint.every_steps=13")
    command = [sys.executable, "-m", "dlrm_autoshard", "train", "parquet", "--ranks=2", *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "auc.click 0." in done.stdout and "auc.buy 0." in done.stdout
    whole = shipped(tmp_path / "data" / "clicks", *small)
    run_ranks(train_in_pieces, 2, tmp_path / "runs" / "pieces", whole, timeout=90)
    weights = [
        sorted((tmp_path / "runs" / run / "checkpoints" / "step_00000040").glob("rank_*.bin"))
        for run in ("parquet", "pieces")
    ]
    assert [path.read_bytes() for path in weights[0]] == [path.read_bytes() for path in weights[1]] != []
    monkeypatch.chdir(tmp_path)
    result = json.loads((tmp_path / "runs/parquet/result.json").read_text())
    metrics = result["metrics"]
    assert metrics["auc"] == pytest.approx((metrics["auc.click"] + metrics["auc.buy"]) / 2)
    assert metrics["auc.click"] > 0.75 and result["best"]["metric"] == "auc"
    assert json.loads(said_by("evaluate", "runs/parquet", "--json"))["auc.buy"] == pytest.approx(metrics["auc.buy"])
    said_by("predict", "runs/parquet", "--out", "predictions.npy")
    predictions = np.load(tmp_path / "predictions.npy")
    assert predictions.shape == (500, 2)
    said_by("export", "runs/parquet", "--out", "model.pt2")
    batch = opened(tmp_path / "data" / "clicks").read("test", 0, 0, 500)
    assert batch.weights_N is not None
    counts = batch.lengths_TB.sum(1).tolist()
    offsets = [lengths.cumsum(0) - lengths for lengths in batch.lengths_TB]
    model = torch.export.load(tmp_path / "model.pt2").module()
    values, weights_ = batch.values_N.long().split(counts), batch.weights_N.split(counts)
    alone = model(batch.dense_BF, list(values), offsets, list(weights_))
    assert np.abs(alone.numpy() - predictions).max() < 1e-6
