"""Meta's embedding traces, from files made here in their format."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_autoshard.commands.table_pools import pool_of_files
from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import DlrmDatasetsData
from dlrm_autoshard.data.batch import Batch, DataError, DataSource
from dlrm_autoshard.data.loader import Loader
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.data.statistics import measure_stats
from dlrm_autoshard.errors import UserError

TABLES, SAMPLES = 5, 60


def made_up(seed: int, samples: int = SAMPLES) -> list[list[list[int]]]:
    """Ids by table and sample; table 3 has no id at all."""
    random = np.random.default_rng(seed)
    return [
        [random.integers(0, 100 * (t + 1), random.integers(0, 5) * (t != 3)).tolist() for _ in range(samples)]
        for t in range(TABLES)
    ]


def saved(path: Path, bags: list[list[list[int]]], old_format: bool = False) -> Path:
    lengths = torch.tensor([[len(bag) for bag in table] for table in bags])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.ravel().cumsum(0)])
    indices = torch.tensor([i for table in bags for bag in table for i in bag], dtype=torch.int64)
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    torch.save((indices, offsets, lengths), plain, _use_new_zipfile_serialization=not old_format)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    return path


def source_of(*files: Path, **keys: object) -> DataSource:
    data = {"source": "dlrm_datasets", "files": [str(file) for file in files], **keys}
    return open_source(DlrmDatasetsData.model_validate(data), TablesConfig())


def bags_of(batch: Batch) -> list[list[list[int]]]:
    ids = iter(batch.values_N.tolist())
    return [[[next(ids) for _ in range(length)] for length in row] for row in batch.lengths_TB.tolist()]


@pytest.mark.parametrize("name", ["fbgemm_t5_bs60_0.pt", "fbgemm_t5_bs60_0.pt.gz"])
@pytest.mark.parametrize("old_format", [False, True])
def test_a_file_is_read_as_it_was_made(tmp_path: Path, name: str, old_format: bool) -> None:
    bags = made_up(0)
    source = source_of(saved(tmp_path / name, bags, old_format))
    assert [source.num_samples(split) for split in ("train", "val", "test")] == [54, 0, 6]
    assert bags_of(source.read("train", 0, 0, 54)) == [table[:54] for table in bags]
    assert bags_of(source.read("test", 0, 1, 5)) == [table[55:59] for table in bags]
    assert [table.name for table in source.tables] == ["t_0", "t_1", "t_2", "t_3", "t_4"]
    for table, row in zip(bags, source.tables, strict=True):
        largest = max((i for bag in table for i in bag), default=0)
        assert largest < row.num_embeddings <= largest + 64 and row.num_embeddings % 64 == 0


def test_files_follow_each_other_and_tables_can_be_chosen(tmp_path: Path) -> None:
    first, second = made_up(1), made_up(2, samples=40)
    files = saved(tmp_path / "a.pt", first), saved(tmp_path / "b.pt.gz", second)
    source = source_of(*files, tables=[4, 1])
    assert [source.num_samples(split) for split in ("train", "val", "test")] == [90, 0, 10]
    wanted = [first[4] + second[4], first[1] + second[1]]
    assert bags_of(source.read("train", 0, 50, 80)) == [table[50:80] for table in wanted]
    pieces = [source.read("train", 0, a, b) for a, b in [(50, 58), (58, 71), (71, 80)]]
    whole = source.read("train", 0, 50, 80)
    assert torch.equal(torch.cat([piece.labels_B for piece in pieces]), whole.labels_B)
    assert torch.equal(torch.cat([piece.dense_BF for piece in pieces]), whole.dense_BF)
    assert [table.name for table in source.tables] == ["t_4", "t_1"]
    assert sum(batch.size for rank in range(2) for batch in Loader(source, "train", 0, 16, rank, 2)) == 90


def test_a_packed_file_is_unpacked_once(tmp_path: Path) -> None:
    packed = saved(tmp_path / "a.pt.gz", made_up(0))
    source_of(packed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "a.pt.gz"]
    made = (tmp_path / "a.pt").stat().st_mtime_ns
    source_of(packed)
    assert (tmp_path / "a.pt").stat().st_mtime_ns == made


def test_rows_can_be_given_and_are_then_checked(tmp_path: Path) -> None:
    source = source_of(saved(tmp_path / "a.pt", made_up(0)), num_embeddings=[20] * TABLES, num_dense=2)
    assert source.num_dense == 2
    with pytest.raises(DataError, match="table 't_0' has 20 rows"):
        list(Loader(source, "train", 0, 54, 0, 1))
    with pytest.raises(DataError, match="has 1 numbers, but there are 5 tables"):
        source_of(tmp_path / "a.pt", num_embeddings=[20])


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    good = saved(tmp_path / "good.pt", made_up(0)).read_bytes()
    packed = gzip.compress(good)
    cases = {
        "missing.pt": (None, "does not exist"),
        "short.pt": (good[: len(good) // 2], "truncated"),
        "empty.pt": (b"", "truncated"),
        "foreign.pt": (b"PAR1" + bytes(3000), "is not a file of torch.save"),
        "cut.pt.gz": (packed[: len(packed) // 2], "truncated gzip file"),
        "other.pt.gz": (good, "gzip file"),
    }
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as caught:
            source_of(tmp_path / name)
        assert name in str(caught.value) and message in str(caught.value)
    assert not list(tmp_path.glob("*.partial"))
    assert not (tmp_path / "cut.pt").exists() and not (tmp_path / "other.pt").exists()


def test_contents_that_disagree_are_named(tmp_path: Path) -> None:
    indices, offsets, lengths = torch.load(saved(tmp_path / "a.pt", made_up(0)))
    shifted = offsets.clone()
    shifted[SAMPLES + 7] += 1  # the seventh sample of table 1 starts one later
    for content, message in [
        ({"indices": indices}, "holds something else"),
        ((indices, offsets, lengths.ravel()), "should be [tables, samples]"),
        ((indices, shifted, lengths), "disagree in table 1, sample 6"),
        ((indices[:-3], offsets, lengths), "indices"),
    ]:
        torch.save(content, tmp_path / "b.pt")
        with pytest.raises(DataError) as caught:
            source_of(tmp_path / "b.pt")
        assert "b.pt" in str(caught.value) and message in str(caught.value)
    with pytest.raises(DataError, match=r"data.tables has 5, but .* has tables 0 to 4"):
        source_of(tmp_path / "a.pt", tables=[5])
    with pytest.raises(DataError, match="different numbers of tables"):
        source_of(tmp_path / "a.pt", saved(tmp_path / "c.pt", made_up(0)[:3]))


def test_files_without_ids_or_tables_and_files_twice_are_named(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole.pt", made_up(0))
    indices, offsets, lengths = torch.load(whole)
    for name, content in (
        ("indices", (indices.bfloat16(), offsets, lengths)),
        ("lengths", (indices, offsets, lengths.to(torch.int16))),
        ("offsets", (indices, offsets.double(), lengths)),
        ("indices", (indices.to_sparse(), offsets, lengths)),
    ):
        torch.save(content, tmp_path / "odd.pt")
        with pytest.raises(DataError, match=rf"odd\.pt' holds {name} as .*; it must be int32 or int64"):
            source_of(tmp_path / "odd.pt")
    for shape in ((0, 60), (5, 0), (0, 0)):
        torch.save((indices[:0], offsets[:1], torch.zeros(shape, dtype=torch.int64)), tmp_path / "odd.pt")
        with pytest.raises(DataError, match=rf"odd\.pt' holds lengths of {shape[0]} tables and {shape[1]} samples"):
            source_of(tmp_path / "odd.pt")
    with pytest.raises(DataError, match=r"data\.tables is empty"):
        source_of(whole, tables=[])
    (tmp_path / "link.pt").symlink_to(whole)
    with pytest.raises(DataError, match=r"data\.files names '.*link\.pt' twice"):
        source_of(whole, tmp_path / "link.pt")
    other = saved(tmp_path / "narrow.pt", made_up(1))
    torch.save(tuple(tensor.int() for tensor in torch.load(other)), other)
    assert source_of(whole, other).read("train", 0, 50, 70).values_N.dtype == torch.int64


def test_ids_below_0_are_named_before_they_are_counted(tmp_path: Path) -> None:
    bags = made_up(0)
    bags[1][7] = [5, -3]
    source = source_of(saved(tmp_path / "a.pt", bags))
    with pytest.raises(DataError, match=r"table 't_1' has \d+ rows .* sample 7 .* has id -3"):
        measure_stats(source, 54, 1)
    with pytest.raises(UserError, match=r"table 't_1' of '.*a\.pt' has id -3; ids are 0 or more"):
        pool_of_files([str(tmp_path / "a.pt")], TablesConfig(), None, quiet=True)
