"""Parquet columns of any type: one value gets one row whatever its type, what is missing is an empty bag, and what
cannot be meant is named with its file, row and column."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard.commands.main import main
from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import ParquetData
from dlrm_autoshard.data.batch import Batch, DataError
from dlrm_autoshard.data.loader import Loader
from dlrm_autoshard.data.open import open_source, settled
from dlrm_autoshard.data.sources.parquet import ParquetSource
from dlrm_autoshard.data.statistics import measure_stats

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 100


def written(path: Path, users: Any, **columns: Any) -> Path:
    given_ = {"click": pa.array([0, 1] * len(users))[: len(users)], "user": users, **columns}
    pq.write_table(pa.table(given_), path)
    return path


def section(train: Path, **keys: Any) -> ParquetData:
    table = {"column": "user", "num_embeddings": ROWS, **keys.pop("table", {})}
    files = {"train": [str(train)], "labels": {"click": 1}, "tables": [table], "shuffle": False}
    return ParquetData.model_validate({"source": "parquet", **files, **keys})


def opened(train: Path, **keys: Any) -> ParquetSource:
    return ParquetSource(section(train, **keys), TablesConfig())


def bags(batch: Batch) -> list[list[int]]:
    ids = iter(batch.values_N.tolist())
    return [[next(ids) for _ in range(length)] for length in batch.lengths_TB[0].tolist()]


def rows_of(path: Path, users: Any, **keys: Any) -> list[list[int]]:
    return bags(opened(written(path, users), **keys).read("train", 0, 0, len(users)))


def text(values: list[int | None]) -> list[str | None]:
    return [None if value is None else str(value) for value in values]


def reals(values: list[int | None]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def decimals(values: list[int | None], kind: Any) -> Any:
    return pa.array([None if value is None else Decimal(value) for value in values], kind)


SMALL: dict[str, Callable[[list[int | None]], Any]] = {
    "int8": lambda v: pa.array(v, pa.int8()),
    "int32": lambda v: pa.array(v, pa.int32()),
    "float16": lambda v: pa.array(np.array(reals(v), np.float16), from_pandas=False),
    "float32": lambda v: pa.array(np.array(reals(v), np.float32), from_pandas=False),
    "float64": lambda v: pa.array(reals(v), pa.float64(), from_pandas=False),
    "decimal": lambda v: decimals(v, pa.decimal128(20, 3)),
    "decimal256": lambda v: decimals(v, pa.decimal256(50, 0)),
    "dictionary": lambda v: pa.array(v, pa.int64()).dictionary_encode(),
    "list": lambda v: pa.array([None if x is None else [x] for x in v], pa.list_(pa.int16())),
    "large_list": lambda v: pa.array([None if x is None else [x] for x in v], pa.large_list(pa.float64())),
    "fixed_size_list": lambda v: pa.array([None if x is None else [x] for x in v], pa.list_(pa.int64(), 1)),
}
TEXT: dict[str, Callable[[list[int | None]], Any]] = {
    "string": lambda v: pa.array(text(v), pa.string()),
    "large_string": lambda v: pa.array(text(v), pa.large_string()),
    "binary": lambda v: pa.array([None if x is None else str(x).encode() for x in v], pa.binary()),
    "text dictionary": lambda v: pa.array(text(v), pa.string()).dictionary_encode(),
    "text list": lambda v: pa.array([None if x is None else [str(x)] for x in v], pa.list_(pa.string())),
}
if hasattr(pa, "list_view"):  # newer types than the oldest pyarrow has
    SMALL["list_view"] = lambda v: pa.array([None if x is None else [x] for x in v], pa.list_view(pa.int64()))
    TEXT["string_view"] = lambda v: pa.array(text(v), pa.string_view())
    TEXT["binary_view"] = lambda v: pa.array([None if x is None else str(x).encode() for x in v], pa.binary_view())
if hasattr(pa, "decimal32"):
    SMALL["decimal32"] = lambda v: decimals(v, pa.decimal32(6, 2))
FORMS = [*SMALL, *TEXT]


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.none() | st.integers(-128, 127), min_size=1, max_size=12), form=st.sampled_from(FORMS))
def test_a_value_gets_one_row_whatever_its_type(
    values: list[int | None], form: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    hashed = rows_of(path, pa.array(values, pa.int64()), table={"hash": True})
    assert all(0 <= row < ROWS for bag in hashed for row in bag)
    assert [len(bag) for bag in hashed] == [value is not None for value in values]
    assert rows_of(path, {**SMALL, **TEXT}[form](values), table={"hash": True}) == hashed
    if form in SMALL:
        assert rows_of(path, SMALL[form](values)) == [[] if value is None else [value] for value in values]


def test_long_numbers_are_one_value_too_and_other_text_is_another(tmp_path: Path) -> None:
    path, long = tmp_path / "any.parquet", [2**64 - 8, 2**63, 2**53 + 1]

    def hashed(users: Any) -> list[list[int]]:
        return rows_of(path, users, table={"hash": True, "num_embeddings": 2**40})

    wide = hashed(pa.array(long, pa.uint64()))
    assert hashed(pa.array(text([*long]))) == wide == hashed(decimals([*long], pa.decimal128(38, 0)))
    other = ["7", "07", "7.0", " 7", "+7", "-0", "0", "7\n", "\u0667", "99999999999999999999"]
    assert len({row for [row] in hashed(pa.array(other))}) == len(other)
    assert hashed(pa.array([True, False])) == hashed(pa.array([1, 0]))
    assert rows_of(path, pa.array([True, False])) == [[1], [0]]


def test_a_file_of_another_type_is_the_same_users_or_refused_by_both_names(tmp_path: Path) -> None:
    train = written(tmp_path / "train.parquet", pa.array([7, 8]))
    words = written(tmp_path / "words.parquet", pa.array(["7", "8"]))
    for first, second in ((train, words), (words, train)):
        source = opened(first, test=[str(second)], table={"hash": True})
        assert source.read("train", 0, 0, 2).values_N.tolist() == source.read("test", 0, 0, 2).values_N.tolist()
    said = r"'.*words\.parquet': column 'user' holds string, .* used as rows, as '.*train\.parquet' holds int64\."
    for split in ("val", "test"):
        with pytest.raises(DataError, match=said):
            opened(train, **{split: [str(words)]})
    source = opened(words, test=[str(train)])  # text first: all are hashed
    assert source.read("train", 0, 0, 2).values_N.tolist() == source.read("test", 0, 0, 2).values_N.tolist()


def test_what_the_first_files_had_is_recorded_and_held_against_later_ones(tmp_path: Path) -> None:
    train = written(tmp_path / "train.parquet", pa.array([7, 8]))
    words = written(tmp_path / "words.parquet", pa.array(["7", "8"]))
    empty = written(tmp_path / "empty.parquet", pa.nulls(2))
    for files, hashed in (([empty, train], False), ([empty, words], True), ([empty], None)):
        data = section(files[0], val=list(map(str, files[1:])))
        recorded = settled(data, open_source(data, TablesConfig()))
        assert isinstance(recorded, ParquetData) and recorded.tables[0].hash is hashed
    numbers = settled(section(train), opened(train))
    later = numbers.model_copy(update={"test": [str(words)]})
    with pytest.raises(DataError, match=r"words\.parquet': column 'user' holds string, but its ids are used as rows"):
        open_source(later, TablesConfig(), labelled=False, splits=["test"])


def test_a_run_goes_on_with_the_rows_that_it_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"source": "parquet", "train": ["a.parquet"], "labels": {"click": 1}}
    config = {"data": {**files, "tables": [{"column": "user", "num_embeddings": 9}]}, "train": {"batch_size": 2}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**config, "profile": {"enabled": False}}))
    written(tmp_path / "a.parquet", pa.array([1, 2, 3, 4]))
    assert main(["train", "job.yaml", "--ranks=1", "run.name=job", "train.max_steps=1"]) == 0
    assert yaml.safe_load((tmp_path / "runs/job/config.yaml").read_text())["data"]["tables"][0]["hash"] is False
    written(tmp_path / "a.parquet", pa.array(["1", "2", "3", "4"]))
    assert main(["train", "job.yaml", "--ranks=1", "--resume=runs/job"]) == 2
    said = capfd.readouterr()
    assert "'a.parquet': column 'user' holds string, but its ids are used as rows" in said.err + said.out


@pytest.mark.parametrize("nothing", [pa.nulls(3), pa.array([[]] * 3), pa.nulls(3, pa.int64())])
def test_a_file_without_a_value_is_of_empty_bags_and_zeros(nothing: Any, tmp_path: Path) -> None:
    written(tmp_path / "a.parquet", pa.array([1, 2, 3]), x=pa.array([1.0, 2.0, 3.0]))
    written(tmp_path / "b.parquet", nothing, x=pa.nulls(3))
    data = section(tmp_path / "*.parquet", dense=["x"])
    source = ParquetSource(data, TablesConfig())
    batch = source.read("train", 0, 0, 6)
    assert bags(batch) == [[1], [2], [3], [], [], []]
    assert batch.dense_BF[:, 0].tolist() == [1, 2, 3, 0, 0, 0]
    assert len(list(Loader(source, "train", 0, 2, 0, 1))) == 3
    assert measure_stats(source, 6, 1)[0].mean_pooling == 0.5


def test_dense_features_labels_and_weights_of_any_type_of_numbers(tmp_path: Path) -> None:
    columns = {
        "x": decimals([1, None, 3], pa.decimal128(9, 2)), "y": pa.array([True, False, None]),
        "z": pa.array(np.array([0.5, 1, 2], np.float16)), "d": pa.array([5, 6, 5]).dictionary_encode(),
        "by": pa.array([[1.5], [2.5], None], pa.list_(pa.float32())),
    }  # fmt: skip
    path = written(tmp_path / "a.parquet", pa.array([1, 2, None]), **columns)
    batch = opened(path, dense=["x", "y", "z", "d"], table={"weights": "by"}).read("train", 0, 0, 3)
    assert batch.dense_BF.tolist() == [[1, 1, 0.5, 5], [0, 0, 1, 6], [3, 0, 2, 5]]
    assert batch.weights_N is not None and batch.weights_N.tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("users", "said"),
    [
        (pa.array([1.0, 2.5, 3.0]), r"a\.parquet, row group 0', row 1: 'user' is 2\.5: ids are whole numbers"),
        (pa.array([1.0, 2.0, 2.0**53]), r"row 2: 'user' is 9007199254740992\.0: from 9,007,199,254,740,992 on, double"),
        (pa.array([[1.0], [], [2, math.inf]]), r"row 2: 'user' is inf: ids are whole numbers"),
        (pa.array([[1], [2, None], [3]]), r"row 1: 'user' is null in a list\. Leave it out of the list"),
        (pa.array([Decimal("1.5"), 2, 3], pa.decimal128(9, 2)), r"row 0: 'user' is 1\.50: ids are whole numbers"),
        (decimals([1, 2, 2**70], pa.decimal128(38, 0)), r"row 2: 'user' is 1180591620717411303424: .* 64 bits"),
        (pa.array([1, 2, 2**64 - 1], pa.uint64()), r"row 2: 'user' is 18446744073709551615, but its table has"),
        (pa.array([0, 1, 2], pa.timestamp("ms")), r"'user' holds timestamp\[ms\]; it must hold whole numbers or text"),
        (pa.array([{"a": 1}] * 3), r"'user' holds struct<a: int64>; it must hold .* with the column cast to one"),
        (pa.array([[[1]]] * 3), r"'user' holds list<element: list<element: int64>>; it must hold"),
    ],
)
def test_what_cannot_be_ids_is_named(users: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        rows_of(tmp_path / "a.parquet", users)


def test_a_column_that_is_there_twice_is_named(tmp_path: Path) -> None:
    names = ["click", "user", "other", "other"]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table([pa.array([0]), pa.array([7]), pa.array([1]), pa.array([2])], names=names), path)
    assert opened(path).read("train", 0, 0, 1).values_N.tolist() == [7]
    with pytest.raises(DataError, match=r"a\.parquet' has 2 columns named 'other'"):
        opened(path, dense=["other"])


BAD = [5, -1, 2**63, 2**64 - 8, ROWS]


@pytest.mark.parametrize(
    ("remedy", "expected"),
    [
        ("clip", [5, 0, ROWS - 1, ROWS - 1, ROWS - 1]),
        ("hash", [5, -1 % ROWS, 2**63 % ROWS, (2**64 - 8) % ROWS, 0]),
    ],
)
def test_ids_that_are_no_rows_are_repaired_as_asked(remedy: Any, expected: list[int], tmp_path: Path) -> None:
    for values, kind in (([5, -1, ROWS], pa.int64()), ([5, *BAD[2:]], pa.uint64())):
        path = written(tmp_path / "a.parquet", pa.array(values, kind))
        source = opened(path, on_bad_id=remedy)
        read = next(iter(Loader(source, "train", 0, 8, 0, 1, on_bad_id=remedy))).values_N
        assert read.tolist() == [expected[BAD.index(value)] for value in values]
        assert measure_stats(source, len(values), 1, on_bad_id=remedy)[0].mean_pooling == 1


@pytest.mark.parametrize("bad", BAD[1:])
def test_ids_that_are_no_rows_are_named_with_file_row_and_column(bad: int, tmp_path: Path) -> None:
    users = pa.array([1, bad], pa.uint64() if bad > 0 else pa.int8())
    source = opened(written(tmp_path / "a.parquet", users))
    for use in (lambda: measure_stats(source, 2, 1), lambda: list(Loader(source, "train", 0, 2, 0, 1))):
        with pytest.raises(DataError) as caught:
            use()
        for part in (f"{tmp_path}/a.parquet", "row group 0", "row 1", "'user'", f" {bad}", "ids 0 to 99", "on_bad_id"):
            assert part in str(caught.value)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"user": pa.array(["a", "b"])}, r"column 'user' held int64 then, and string now"),
        ({"user": pa.array([1.0, 2.0])}, r"column 'user' held int64 then, and double now"),
        ({"other": pa.array([1, 2])}, r"column 'user' held int64 then, and is not there now"),
        ({"user": pa.array([1, 2, 3])}, r"row group 0 had 2 rows then, and has 3 now"),
        ({"user": pa.array([], pa.int64())}, r"row group 0 had 2 rows then, and has 0 now"),
    ],
)
def test_a_file_that_is_replaced_in_mid_run_is_named(now: dict[str, Any], said: str, tmp_path: Path) -> None:
    source = opened(written(tmp_path / "a.parquet", pa.array([1, 2])))
    length = len(next(iter(now.values())))
    pq.write_table(pa.table({"click": pa.array([0] * length, pa.int64()), **now}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet' has been replaced since this job opened it: {said}\. Put"):
        source.read("train", 0, 0, 2)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(DataError, match=r"a\.parquet, row group 0' cannot be read as parquet"):
        source.read("train", 0, 0, 2)
