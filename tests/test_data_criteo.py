"""Reading Criteo's npy layout: days and splits, multi-hot, table sizes, and files that cannot be used."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard.commands.main import main
from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import CriteoData
from dlrm_autoshard.data.batch import Batch, DataError, DataSource
from dlrm_autoshard.data.loader import Loader
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.data.sources.criteo.npy_files import map_npz
from dlrm_autoshard.data.sources.criteo.preprocess import Contiguous, preprocess
from dlrm_autoshard.data.sources.criteo.sample import MULTI_HOT_SIZES, SAMPLE_ROWS, write_sample_layout
from tests.criteo_text import write_sample_text

DAYS = [70, 50, 31]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("criteo") / "npy"
    write_sample_layout(folder, DAYS)
    return folder


def source_in(folder: Path, **keys: object) -> DataSource:
    return open_source(
        CriteoData.model_validate({"source": "criteo", "dir": str(folder), **keys}), TablesConfig(embedding_dim=8)
    )


def by_table(batch: Batch) -> list[list[int]]:
    return [ids.tolist() for ids in batch.values_N.split(batch.lengths_TB.sum(1).tolist())]


def column(folder: Path, part: str, days: list[int]) -> np.ndarray:
    return np.concatenate([np.load(folder / f"day_{day}_{part}.npy") for day in days])


def test_the_last_day_is_held_out_and_halved(folder: Path) -> None:
    source = source_in(folder)
    assert [source.num_samples(split) for split in ("train", "val", "test")] == [120, 16, 15]
    train = source.read("train", 0, 0, 120)
    assert by_table(train) == column(folder, "sparse", [0, 1]).T.tolist()
    assert torch.equal(train.dense_BF, torch.from_numpy(column(folder, "dense", [0, 1])))
    assert train.labels_B.tolist() == column(folder, "labels", [0, 1])[:, 0].tolist()
    assert by_table(source.read("test", 3, 0, 15)) == column(folder, "sparse", [2])[16:].T.tolist()


def test_days_can_be_chosen(folder: Path) -> None:
    source = source_in(folder, train_days=[1], test_days=[0])
    assert [source.num_samples(split) for split in ("train", "val", "test")] == [50, 35, 35]
    with pytest.raises(DataError, match=r"test_days has day 7, but .* has only days \[0, 1, 2\]"):
        source_in(folder, test_days=[7])


@pytest.mark.parametrize(
    ("keys", "samples"),
    [
        ({"test_days": [1]}, [101, 25, 25]),
        ({"train_days": [1]}, [50, 51, 50]),
        ({"test_days": []}, [151, 0, 0]),
        ({"train_days": [0, 1, 2]}, [151, 0, 0]),
    ],
)
def test_no_day_is_both_trained_and_tested_on(folder: Path, keys: dict[str, list[int]], samples: list[int]) -> None:
    source = source_in(folder, **keys)
    assert [source.num_samples(split) for split in ("train", "val", "test")] == samples
    assert source.read("test", 0, 0, samples[2]).size == samples[2]


@pytest.mark.parametrize(("test_days", "samples"), [([0, 1, 2], 151), ([0], 70), (None, 151)])
def test_days_that_nothing_is_trained_on_are_all_for_testing(
    folder: Path, test_days: list[int] | None, samples: int
) -> None:
    keys = {"source": "criteo", "dir": str(folder), "train_days": [], "test_days": test_days}
    source = open_source(CriteoData.model_validate(keys), TablesConfig(embedding_dim=8), splits=["test"])
    assert [source.num_samples(split) for split in ("train", "val", "test")] == [0, 0, samples]
    assert by_table(source.read("test", 0, 0, 70)) == column(folder, "sparse", [0]).T.tolist()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"train_days": [0, 1], "test_days": [1, 2]}, r"both have days \[1\]: .* Remove them from one"),
        ({"train_days": [], "test_days": []}, r"nothing to train on\. Days \[\] of .* \[\] for testing"),
        ({"test_days": [0, 1, 2]}, r"nothing to train on\. Days \[\] of .* \[0, 1, 2\] for testing"),
    ],
)
def test_days_that_cannot_be_trained_on_are_named(folder: Path, keys: dict[str, list[int]], said: str) -> None:
    with pytest.raises(DataError, match=said):
        source_in(folder, **keys)


@pytest.mark.parametrize("multi_hot", [False, True])
def test_a_day_may_have_no_rows_but_not_all_days_to_train_on(folder: Path, tmp_path: Path, multi_hot: bool) -> None:
    for path in folder.glob("day_*.npy"):
        np.save(tmp_path / path.name, np.load(path)[: 0 if path.name.startswith("day_1_") else None])
    for path in folder.glob("day_*.npz"):
        rows = 0 if path.name.startswith("day_1_") else None
        np.savez(tmp_path / path.name, allow_pickle=False, **{name: ids[:rows] for name, ids in np.load(path).items()})
    source = source_in(tmp_path, multi_hot=multi_hot)
    assert [source.num_samples(split) for split in ("train", "val", "test")] == [70, 16, 15]
    assert sum(batch.size for batch in Loader(source, "train", 0, 32, 0, 1)) == 70
    with pytest.raises(DataError, match=r"nothing to train on\. Days \[1\] of .* \{0: 70, 1: 0, 2: 31\}"):
        source_in(tmp_path, multi_hot=multi_hot, train_days=[1])


def test_a_single_day_can_be_trained_on_whole(tmp_path: Path) -> None:
    write_sample_layout(tmp_path / "npy", [70])
    source = source_in(tmp_path / "npy", test_days=[])
    assert [source.num_samples(split) for split in ("train", "val", "test")] == [70, 0, 0]


def test_a_single_day_is_split_as_a_week(tmp_path: Path) -> None:
    write_sample_layout(tmp_path / "npy", [70])
    source = source_in(tmp_path / "npy")
    assert [source.num_samples(split) for split in ("train", "val", "test")] == [60, 5, 5]
    whole = np.load(tmp_path / "npy" / "day_0_labels.npy")[:, 0].tolist()
    parts = [source.read(split, 0, 0, source.num_samples(split)).labels_B for split in ("train", "val", "test")]
    assert torch.cat(parts).tolist() == whole


@settings(max_examples=30, deadline=None)
@given(edges=st.lists(st.integers(0, 120), max_size=6), multi_hot=st.booleans())
def test_samples_do_not_depend_on_the_pieces_they_are_read_in(folder: Path, edges: list[int], multi_hot: bool) -> None:
    source = source_in(folder, multi_hot=multi_hot)
    cuts = [0, *sorted(edges), 120]
    pieces = [source.read("train", 0, first, last) for first, last in itertools.pairwise(cuts)]
    whole = source.read("train", 0, 0, 120)
    joined = [[i for piece in pieces for i in by_table(piece)[table]] for table in range(26)]
    assert joined == by_table(whole)
    assert torch.equal(torch.cat([piece.dense_BF for piece in pieces]), whole.dense_BF)


def test_multi_hot_ids_come_from_the_npz(folder: Path) -> None:
    source = source_in(folder, multi_hot=True)
    batch = source.read("train", 0, 65, 75)  # over the end of day 0
    assert batch.lengths_TB.tolist() == [[size] * 10 for size in MULTI_HOT_SIZES]
    days = [np.load(folder / f"day_{day}_sparse_multi_hot.npz") for day in (0, 1)]
    for table, ids in enumerate(by_table(batch)):
        wanted = np.concatenate([days[0][str(table)][65:], days[1][str(table)][:5]])
        assert ids == wanted.ravel().tolist()
    assert [batch.size for batch in Loader(source, "test", 0, 4, 1, 2)] == [4, 3]


def test_rows_come_from_the_config_then_the_record_then_the_data(folder: Path, tmp_path: Path) -> None:
    assert [table.num_embeddings for table in source_in(folder).tables] == list(SAMPLE_ROWS)
    assert [table.name for table in source_in(folder).tables][:2] == ["t_cat_0", "t_cat_1"]

    capped = source_in(folder, num_embeddings=[7] * 26)
    wanted = column(folder, "sparse", [0, 1]) % 7
    assert by_table(capped.read("train", 0, 0, 120)) == wanted.T.tolist()

    for path in folder.glob("*.npy"):
        (tmp_path / path.name).symlink_to(path)
    largest = column(folder, "sparse", [0, 1, 2]).max(axis=0)
    assert [table.num_embeddings for table in source_in(tmp_path).tables] == (largest + 1).tolist()

    with pytest.raises(DataError, match="num_embeddings has 3 numbers"):
        source_in(folder, num_embeddings=[7] * 3)


def test_row_scale_shrinks_large_tables_and_wraps_their_ids(folder: Path) -> None:
    source = source_in(folder, row_scale=0.05)
    rows = [table.num_embeddings for table in source.tables]
    assert rows == [size if size <= 1000 else max(1000, int(size * 0.05)) for size in SAMPLE_ROWS]
    for batch in Loader(source, "train", 0, 50, 0, 1):  # which checks all ids
        assert batch.values_N.dtype == torch.int32


def test_an_id_beyond_its_table_is_an_error_unless_wrapped(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    sparse = np.load(tmp_path / "day_1_sparse.npy")
    sparse[3, 2] = 100_000
    np.save(tmp_path / "day_1_sparse.npy", sparse)
    with pytest.raises(DataError, match=r"'t_cat_2' has 100000 rows .* sample 73 .* id 100000"):
        list(Loader(source_in(tmp_path), "train", 0, 16, 0, 1))
    list(Loader(source_in(tmp_path, row_scale=0.5), "train", 0, 16, 0, 1))


def break_file(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    elif how == "header only":
        path.write_bytes(path.read_bytes()[:40])
    elif how == "foreign":
        path.write_bytes(b"PAR1" + bytes(500))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "shape":
        np.save(path, np.load(path)[:, :-1] if "sparse" in path.name or "dense" in path.name else np.zeros((3, 1)))


@pytest.mark.parametrize(
    ("part", "how"),
    [
        (part, how)
        for part in ("dense.npy", "sparse.npy", "labels.npy", "sparse_multi_hot.npz")
        for how in ("missing", "truncated", "header only", "foreign", "empty", "shape")
        # Without its labels a day does not count as present; numpy does not save an npz as an array.
        if (part, how) not in {("labels.npy", "missing"), ("sparse_multi_hot.npz", "shape")}
    ],
)
def test_files_that_cannot_be_used_are_named(folder: Path, tmp_path: Path, part: str, how: str) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    break_file(tmp_path / f"day_1_{part}", how)
    with pytest.raises(DataError) as caught:
        source_in(tmp_path, multi_hot=part.endswith("npz"))
    assert "day_1_" in str(caught.value)
    wanted = {"missing": "does not exist", "truncated": "truncated", "shape": "it should be"}.get(how, "")
    assert wanted in str(caught.value)


def test_a_compressed_or_incomplete_npz_is_named(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    arrays = dict(np.load(tmp_path / "day_0_sparse_multi_hot.npz"))
    np.savez_compressed(tmp_path / "day_0_sparse_multi_hot.npz", allow_pickle=True, **arrays)
    with pytest.raises(DataError, match="is compressed"):
        source_in(tmp_path, multi_hot=True)
    del arrays["4"]
    np.savez(tmp_path / "day_0_sparse_multi_hot.npz", allow_pickle=True, **arrays)
    with pytest.raises(DataError, match="lacks 4"):
        source_in(tmp_path, multi_hot=True)


def test_mapped_arrays_are_the_arrays(folder: Path) -> None:
    path = folder / "day_0_sparse_multi_hot.npz"
    mapped, loaded = map_npz(path), np.load(path)
    assert sorted(mapped) == sorted(loaded.files)
    assert all(isinstance(array, np.memmap) for array in mapped.values())
    assert all(np.array_equal(mapped[name], loaded[name]) for name in loaded.files)


def test_from_text_to_batches(tmp_path: Path) -> None:
    write_sample_text(tmp_path / "train.txt", 700)
    preprocess([tmp_path / "train.txt"], tmp_path / "npy", Contiguous(2))
    source = source_in(tmp_path / "npy")
    seen = [sum(batch.size for batch in Loader(source, split, 0, 64, 0, 1)) for split in ("train", "val", "test")]
    assert seen == [600, 50, 50]


def test_an_empty_folder_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"has no day_\*_labels.npy.*criteo-sample"):
        source_in(tmp_path / "nothing")
    assert main(["data", "criteo-sample", "--out", str(tmp_path / "made"), "--rows", "40"]) == 0
    assert "made-up" in capsys.readouterr().out
    assert source_in(tmp_path / "made").num_samples("train") == 40


def with_header(path: Path, **about: object) -> None:
    """The file with an npy header that says something else of its bytes."""
    array = np.load(path)
    text = repr({"descr": array.dtype.str, "fortran_order": False, "shape": array.shape, **about}).encode()
    text = text.ljust(-(-(len(text) + 11) // 64) * 64 - 11) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + array.tobytes())


@pytest.mark.parametrize("part", ["dense", "sparse", "labels"])
@pytest.mark.parametrize(
    "about",
    [
        {"shape": ()},
        {"shape": (True, 13)},
        {"shape": (2**62, 2**40)},
        {"shape": (2**63, 0)},
        {"shape": (-1, 13)},
        {"descr": "|S0"},
        {"descr": "<m8[s]"},
        {"descr": "<M8[s]"},
        {"descr": "<c8"},
        {"descr": "|O"},
        {"descr": [("a", "<i4"), ("b", "<i4")]},
        {"descr": "<U4"},
        {"descr": "|V4"},
    ],
)
def test_headers_that_say_what_cannot_be_are_named(
    part: str, about: dict[str, object], folder: Path, tmp_path: Path
) -> None:
    for path in folder.glob("day_0_*.npy"):
        np.save(tmp_path / path.name, np.load(path))
    with_header(tmp_path / f"day_0_{part}.npy", **about)
    with pytest.raises(DataError, match=rf"day_0_{part}\.npy'"):
        source_in(tmp_path)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        *(("dense", kind) for kind in ("<f2", "<f8", "<f16")),
        *(("labels", kind) for kind in ("|b1", ">f4", "<u8")),
        *(("sparse", kind) for kind in (">i4", "<u2")),
    ],
)
def test_numbers_of_any_width_are_numbers(part: str, kind: str, folder: Path, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    made = {"dense": draw.integers(0, 9, (20, 13)), "sparse": draw.integers(0, 9, (20, 26)),
            "labels": draw.integers(0, 2, (20, 1))}  # fmt: skip
    for name, array in made.items():
        np.save(tmp_path / f"day_0_{name}.npy", array.astype(kind if name == part else "<i4"))
    batch = source_in(tmp_path).read("train", 0, 0, 10)
    assert batch.dense_BF.tolist() == made["dense"][:10].tolist()
    assert batch.labels_B.tolist() == made["labels"][:10, 0].tolist()
    assert by_table(batch) == made["sparse"][:10].T.tolist()


def test_ids_of_63_bits_and_more_are_what_on_bad_id_says(folder: Path, tmp_path: Path) -> None:
    for name, columns in (("dense", 13), ("labels", 1)):
        np.save(tmp_path / f"day_0_{name}.npy", np.zeros((20, columns), np.int32))
    ids = np.zeros((20, 26), np.uint64)
    ids[3, 5] = 2**64 - 9
    np.save(tmp_path / "day_0_sparse.npy", ids)
    (tmp_path / "tables.json").write_text('{"num_embeddings": [' + ", ".join(["7"] * 26) + "]}")
    with pytest.raises(DataError, match=r"row 3 \(from 0\) of '.*day_0_\*' has in table 't_cat_5' id 184467.*607, but"):
        source_in(tmp_path).read("train", 0, 0, 8)
    for remedy, row in (("clip", 6), ("hash", (2**64 - 9) % 7)):
        with Loader(source_in(tmp_path, on_bad_id=remedy), "train", 0, 8, 0, 1, on_bad_id=remedy) as loader:  # type: ignore[arg-type]
            assert by_table(next(iter(loader)))[5][3] == row


def test_multi_hot_of_no_id_a_sample_is_empty_bags(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("day_0_*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    bags = dict(np.load(tmp_path / "day_0_sparse_multi_hot.npz"))
    np.savez(tmp_path / "day_0_sparse_multi_hot.npz", allow_pickle=False, **{**bags, "4": bags["4"][:, :0]})
    batch = source_in(tmp_path, multi_hot=True).read("train", 0, 0, 8)
    assert batch.lengths_TB[4].tolist() == [0] * 8 and by_table(batch)[4] == []


@pytest.mark.parametrize("name", ["\u00b2", "07", "\u0663", "x", "-1", "", "9" * 80])
def test_days_are_named_by_their_number_alone(name: str, folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("day_0_*.npy"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / path.name.replace("_0_", f"_{name}_")).write_bytes(path.read_bytes())
    with pytest.raises(DataError, match=rf"day_{name}_labels\.npy' has no day number in its name"):
        source_in(tmp_path)


def test_a_day_that_is_named_twice_is_refused(folder: Path) -> None:
    for key in ("train_days", "test_days"):
        with pytest.raises(DataError, match=rf"data\.{key} has day 1 twice"):
            source_in(folder, **{key: [1, 1]})
