"""MovieLens on a hand-made folder: what becomes of a rating, the splits, and files that cannot be used."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import MovielensData
from dlrm_autoshard.data.batch import DataError
from dlrm_autoshard.data.loader import Loader
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.data.sources import movielens_fetch
from dlrm_autoshard.data.sources.movielens_fetch import FILES, fetch_movielens

USERS = (
    "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    "7\t24\tM\twriter\t85711\n3\t53\tF\tother\t94043\n"
)
ITEMS = (
    "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    "10\tToy Story\t1995\tAnimation Comedy\n20\t\t1996\tDrama\n30\tStory of a Toy\t1995\tComedy\n"
)


def ratings(count: int = 40) -> str:
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for i in range(count):
        lines.append(f"{[7, 3][i % 2]}\t{[10, 20, 30][i % 3]}\t{1 + i % 5}\t{881250949 + 1000 * ((i * 17) % count)}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in zip(FILES, (ratings(), USERS, ITEMS), strict=True):
        (tmp_path / name).write_text(text)
    return tmp_path


def settings_for(folder: Path, **keys: object) -> MovielensData:
    return MovielensData.model_validate({"source": "movielens", "dir": str(folder), **keys})


def test_a_rating_becomes_nine_bags_a_label_and_dense_features(folder: Path) -> None:
    source = open_source(settings_for(folder, split="time"), TablesConfig())
    rows = {table.name: table.num_embeddings for table in source.tables}
    assert rows == {
        "user": 2, "item": 3, "age": 2, "gender": 2, "occupation": 2, "zip": 2, "year": 2, "genres": 3, "title": 4,
    }  # fmt: skip
    batch = source.read("test", 0, 0, 4)  # the newest: i with (i * 17) % 40 in 36..39, that is 28, 21, 14, 7
    assert batch.labels_B.tolist() == [1.0, 0.0, 1.0, 0.0]  # 4, 2, 5, 3 stars
    assert batch.dense_BF.shape == (4, source.num_dense) and batch.dense_BF.abs().max() <= 1
    bags = batch.values_N.split(batch.lengths_TB.sum(1).tolist())
    names = list(rows)
    assert bags[names.index("user")].tolist() == [1, 0, 1, 0]  # "7", "3": in the order of the words
    assert bags[names.index("item")].tolist() == [1, 0, 2, 1]
    assert batch.lengths_TB[names.index("title")].tolist() == [0, 2, 4, 0]
    assert bags[names.index("title")].tolist() == [3, 2, 2, 1, 0, 3]  # toy story | story of a toy
    assert bags[names.index("genres")].tolist() == [2, 0, 1, 1, 2]


@pytest.mark.parametrize("split", ["random", "time"])
def test_splits_are_fixed_and_share_nothing(folder: Path, split: str) -> None:
    source = open_source(settings_for(folder, split=split), TablesConfig())
    assert [source.num_samples(part) for part in ("train", "val", "test")] == [36, 0, 4]

    def seen(part: str, epoch: int) -> list[tuple[float, ...]]:
        batch = source.read(part, epoch, 0, source.num_samples(part))  # type: ignore[arg-type]
        return [tuple(row) for row in batch.dense_BF.tolist()]  # no two ratings have the same time

    assert seen("test", 0) == seen("test", 5)
    assert seen("train", 0) != seen("train", 1)
    assert sorted(seen("train", 0)) == sorted(seen("train", 1))
    assert len({*seen("train", 0), *seen("test", 0)}) == 40
    if split == "time":
        assert max(row[0] for row in seen("train", 0)) < min(row[0] for row in seen("test", 0))


@pytest.mark.parametrize("split", ["random", "time"])
def test_a_history_has_what_the_user_rated_before_and_nothing_of_the_future(folder: Path, split: str) -> None:
    """Ratings of one second know nothing of each other; the newest are kept, oldest first."""
    text = ratings() + "7\t10\t4\t881255949\n7\t30\t1\t881255949\n"
    (folder / "ml-100k.inter").write_text(text)
    rated = [
        (int(user), item, float(time)) for user, item, _, time in (row.split("\t") for row in text.splitlines()[1:])
    ]
    source = open_source(settings_for(folder, split=split, history=5), TablesConfig())
    names = [table.name for table in source.tables]
    row_of = {"10": 0, "20": 1, "30": 2}
    assert names[-1] == "history" and source.tables[-1].num_embeddings == 3
    first, span = min(time for *_, time in rated), 39_000.0
    seen = 0
    for part in ("train", "test"):
        batch = source.read(part, 3, 0, source.num_samples(part))
        bags = batch.values_N.split(batch.lengths_TB.sum(1).tolist())
        users = bags[names.index("user")].tolist()
        for dense, user, own in zip(batch.dense_BF, users, bags[-1].split(batch.lengths_TB[-1].tolist()), strict=True):
            at = round(first + float(dense[0] + 1) / 2 * span)
            before = sorted((time, n) for n, (who, _, time) in enumerate(rated) if who == [3, 7][user] and time < at)
            assert own.tolist() == [row_of[rated[n][1]] for _, n in before][-5:]
            seen += 1
    assert seen == 42


def test_the_seed_draws_the_split(folder: Path) -> None:
    first, again, other = (open_source(settings_for(folder, seed=seed), TablesConfig()) for seed in (0, 0, 1))
    assert torch.equal(first.read("test", 0, 0, 4).dense_BF, again.read("test", 0, 0, 4).dense_BF)
    assert not torch.equal(first.read("test", 0, 0, 4).dense_BF, other.read("test", 0, 0, 4).dense_BF)


def test_ranks_share_an_epoch(folder: Path) -> None:
    source = open_source(settings_for(folder), TablesConfig())
    sizes = [batch.size for rank in range(3) for batch in Loader(source, "train", 0, 5, rank, 3)]
    assert sum(sizes) == 36


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ml-100k.inter", None, "does not exist. Run `dlrm-autoshard data movielens"),
        ("ml-100k.inter", "", "line 1 should name the columns user_id"),
        ("ml-100k.user", "id,age\n1,2\n", "line 1 should name the columns user_id"),
        ("ml-100k.inter", ratings() + "7\t10\n", "line 42 has 2 columns, not 4. Is the file truncated?"),
        ("ml-100k.inter", ratings() + "7\t99\t3\t881250949\n", "line 42 rates with item_id 99"),
        ("ml-100k.inter", ratings() + "7\t10\tgood\t881250949\n", "line 42 has the rating 'good'"),
        ("ml-100k.item", ITEMS.splitlines()[0] + "\n", "has a header but no rows"),
    ],
)
def test_files_that_cannot_be_used_are_named(folder: Path, name: str, text: str | None, message: str) -> None:
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(DataError) as caught:
        open_source(settings_for(folder), TablesConfig())
    assert name in str(caught.value) and message in str(caught.value)


def test_bytes_that_are_no_text_are_named(folder: Path) -> None:
    (folder / "ml-100k.item").write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(DataError, match=r"ml-100k.item' is not text: byte 4"):
        open_source(settings_for(folder), TablesConfig())


def test_fetching_what_is_there_does_nothing(folder: Path) -> None:
    before = {name: (folder / name).stat().st_mtime_ns for name in FILES}
    assert fetch_movielens(folder) is False
    assert before == {name: (folder / name).stat().st_mtime_ns for name in FILES}


def test_fetching_unpacks_the_wheel(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself is replaced by what it would leave behind: tests have no network."""

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[0] == sys.executable and movielens_fetch.WHEEL in command
        wheel = Path(command[command.index("--dest") + 1]) / "recbole-1.2.1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in FILES:
                archive.write(folder / name, f"recbole/dataset_example/ml-100k/{name}")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    target = tmp_path / "new" / "place"
    assert fetch_movielens(target) is True
    assert sorted(path.name for path in target.iterdir()) == sorted(FILES)
    assert open_source(settings_for(target), TablesConfig()).num_samples("test") == 4


def test_fetching_without_a_network_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr(movielens_fetch, "RETRIES", 0)
    with pytest.raises(DataError, match="Check the network"):
        fetch_movielens(tmp_path / "nothing")
    assert not list((tmp_path / "nothing").iterdir())


def test_fetching_into_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"could not be put into '.*file'"):
        fetch_movielens(tmp_path / "file")
