"""Which parquet files a config means, and which columns may be what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlrm_autoshard.config import ConfigError, TablesConfig, parse_config
from dlrm_autoshard.config_data import ParquetData
from dlrm_autoshard.data.batch import DataError
from dlrm_autoshard.data.open import found, open_source
from dlrm_autoshard.data.sources.parquet_files import parquet_files
from tests.jobs import said_by


@pytest.fixture
def days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files, by whose names alone something is found."""
    for name in ("a.parquet", "01/b.parquet", "01/02/c.PARQUET", "clicks[1].parquet", "_temporary/0/half.parquet",
                 "01/.c.parquet.crc", "01/_SUCCESS", "read me.txt"):  # fmt: skip
        (tmp_path / "days" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "days" / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "days/01")
    (tmp_path / "only" / "x1.parquet").parent.mkdir()
    (tmp_path / "only" / "x1.parquet").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


ALL = ["days/01/02/c.PARQUET", "days/01/b.parquet", "days/a.parquet", "days/clicks[1].parquet"]


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("days", ALL),
        ("days/", ALL),
        ("days/**/*.[pP]*", [*ALL, "days/_temporary/0/half.parquet"]),
        ("days/**/b.parquet", ["days/01/b.parquet"]),
        ("days/*.parquet", ALL[2:]),
        ("days/0*", ALL[:2]),
        ("days/clicks[1].parquet", ALL[3:]),
        ("days/[ab].parquet", ["days/a.parquet"]),
        ("link", ["link/02/c.PARQUET", "link/b.parquet"]),
        ("only/**", ["only/x1.parquet"]),
        ("days/read me.txt", ["days/read me.txt"]),
        ("~/days/a.parquet", ["{home}/days/a.parquet"]),
        ("~/days/*/b.parquet", ["{home}/days/01/b.parquet"]),
        ("file://{home}/days/read%20me.txt", ["{home}/days/read me.txt"]),
        ("file://localhost{home}/days/01", ["{home}/days/01/02/c.PARQUET", "{home}/days/01/b.parquet"]),
    ],
)
def test_a_name_means_these_files(name: str, means: list[str], days: Path) -> None:
    read = parquet_files([name.format(home=days)], "data.train")
    assert read == sorted(path.format(home=days) for path in means)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("s3://bucket/days", "data.train: 's3://bucket/days' is a URL, but only this machine's file systems are read"),
        ("file://host/days", "is a file of the host 'host'"),
        ("days/**/z.parquet", "data.train: there is no file 'days/**/z.parquet'"),
        ("days/clicks[2].parquet", "there is no file 'days/clicks[2].parquet'"),
        ("days/_temporary/0/none", "there is no file"),
        ("a\0b", "is not a file name"),
        ("x" * 5000, "there is no file"),
    ],
)
def test_a_name_that_means_no_file_is_named(name: str, said: str, days: Path) -> None:
    with pytest.raises(DataError) as caught:
        parquet_files([name], "data.train")
    assert said in str(caught.value)
    (days / "bare").mkdir()
    with pytest.raises(DataError, match=r"the folder 'bare' has no file that ends in \.parquet, .* such as bare/\*"):
        parquet_files(["bare"], "data.train")


DATA: dict[str, Any] = {
    "source": "parquet", "train": ["a.parquet"], "labels": {"click": 1.0, "buy": 1.0}, "dense": ["x"],
    "tables": [{"column": "user", "num_embeddings": 9}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"dense": ["x", "buy"]}, "column 'buy' is in data.labels and in data.dense"),
        ({"sample_weight": "click"}, "column 'click' is in data.labels and in data.sample_weight"),
        ({"tables": [{"column": "click", "num_embeddings": 2}]}, "column 'click' is in data.labels and in data.tables"),
        (
            {"tables": [{"column": "user", "num_embeddings": 9, "weights": "buy"}]},
            "column 'buy' is in data.labels and in the weights of data.tables",
        ),
        ({"dense": ["x", "y", "x"]}, "column 'x' is in data.dense 2 times"),
        ({"tables": DATA["tables"] * 2}, "column 'user' is in data.tables 2 times"),
        (
            {"tables": [{"column": "user", "num_embeddings": 9, "weights": "user"}]},
            "'user' of data.tables is named as its own",
        ),
    ],
)
def test_a_column_that_would_leak_or_is_there_twice_is_named(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"data": {**DATA, **keys}})
    assert said in str(caught.value)


def test_the_start_says_what_was_found_and_what_may_be_meant_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    for name, rows in (("days/a", 20), ("days/01/b", 20), ("days/01/02/c", 30), ("test", 10)):
        table = {"click": [0, 1] * (rows // 2), "buy": [1, 0] * (rows // 2), "x": range(rows), "user": [3] * rows}
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(table), f"{name}.parquet")
    data = {**DATA, "train": ["days"], "test": ["test.parquet"], "dense": ["x", "user"]}
    config = {"data": data, "run": {"pin_cores": False}, "profile": {"enabled": False}, "train": {"batch_size": 70}}
    (tmp_path / "job.yaml").write_text(str(config).replace("'", '"').replace("False", "false"))
    source = open_source(ParquetData.model_validate(data), TablesConfig())
    assert found(source) == "data: train 70 samples in 3 files, test 10 samples in 1 file"
    said = said_by("train", "job.yaml", "--ranks=1")
    assert found(source) in said
    assert "column 'user' is in data.dense and in data.tables" in said
