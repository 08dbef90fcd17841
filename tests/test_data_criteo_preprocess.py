"""Criteo text to npy: every field as a plain parser reads it, bad files named by line, nothing half-written."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard.commands.main import main
from dlrm_autoshard.data.batch import DataError
from dlrm_autoshard.data.sources.criteo.preprocess import Contiguous, Modulo, encoding_of, preprocess
from dlrm_autoshard.data.sources.criteo.sample import write_sample_layout
from dlrm_autoshard.data.sources.criteo.text import read_blocks
from dlrm_autoshard.data.sources.criteo.vocabulary import FrequencyCounter
from dlrm_autoshard.errors import UserError
from tests.criteo_text import write_sample_text

Line = tuple[int, list["int | None"], list["str | None"]]

integers = st.one_of(
    st.none(), st.integers(-3, 99), st.integers(-99_999_999, 99_999_999), st.integers(-(2**31) + 1, 2**31 - 1)
)
categories = st.one_of(
    st.none(),
    st.text("0123456789abcdef", min_size=8, max_size=8),
    st.text("0af9F", min_size=1, max_size=8),
)
lines = st.lists(
    st.tuples(
        st.integers(0, 1), st.lists(integers, min_size=13, max_size=13), st.lists(categories, min_size=26, max_size=26)
    ),
    min_size=1,
    max_size=12,
)


def as_text(lines: list[Line], separator: str = "\t", end: str = "\n") -> str:
    def field(value: object) -> str:
        return "" if value is None else str(value)

    return "".join(separator.join(map(field, [label, *numbers, *words])) + end for label, numbers, words in lines)


def good_line(label: int = 1, first_category: str = "68fd1e64") -> str:
    return "\t".join([str(label), *["5"] * 13, first_category, *["0000000a"] * 25]) + "\n"


@settings(max_examples=60, deadline=None)
@given(lines=lines, separator=st.sampled_from("\t,"), end=st.sampled_from(["\n", "\r\n"]), header=st.booleans(),
       compressed=st.booleans(), last_end=st.booleans(), block=st.integers(60, 4000))  # fmt: skip
def test_every_field_is_read_as_a_plain_parser_reads_it(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[Line],
    separator: str,
    end: str,
    header: bool,
    compressed: bool,
    last_end: bool,
    block: int,
) -> None:
    text = as_text(lines, separator, end)
    if not last_end:
        text = text[: -len(end)]
    if header:
        text = separator.join(["label", *[f"c{i}" for i in range(39)]]) + end + text
    path = tmp_path_factory.mktemp("text") / "file"
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    blocks = list(read_blocks(path, block_bytes=block))
    assert np.concatenate([b.labels_B for b in blocks]).tolist() == [label for label, _, _ in lines]
    assert np.concatenate([b.integers_BF for b in blocks]).tolist() == [[x or 0 for x in row] for _, row, _ in lines]
    wanted = [[int(x or "0", 16) for x in row] for _, _, row in lines]
    assert np.concatenate([b.categories_BT for b in blocks]).tolist() == wanted
    assert blocks[-1].file_position == path.stat().st_size


@pytest.mark.parametrize("label", ["1.0", "1"])
def test_a_first_line_with_a_label_is_a_sample(tmp_path: Path, label: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text((label + good_line()[1:] + good_line(0)).replace("\t", ","))
    assert next(read_blocks(path)).labels_B.tolist() == [1, 0]


@pytest.mark.parametrize(
    "names",
    [
        ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))],
        ["click", *(f"int_{i}" for i in range(13)), *(f"cat_{i}" for i in range(26))],
        [f"_c{i}" for i in range(40)],
    ],
)
def test_columns_are_read_by_the_headers_names(names: list[str], tmp_path: Path) -> None:
    values = dict(zip(names, ["1", *map(str, range(1, 14)), *(f"{i:08x}" for i in range(26))], strict=True))
    order = np.random.default_rng(0).permutation(names).tolist()
    path = tmp_path / "log.csv"
    path.write_text("\r\n".join(",".join(line) for line in ([f'"{n}"' for n in order], [values[n] for n in order])))
    block = next(read_blocks(path))
    assert (block.labels_B.tolist(), block.integers_BF.tolist()) == ([1], [[*range(1, 14)]])
    assert block.categories_BT.tolist() == [[*range(26)]]
    broken = {**values, names[20]: "zz"}
    path.write_text("\n".join(",".join(line) for line in (order, [broken[n] for n in order])))
    with pytest.raises(DataError, match=f"line 2 column {order.index(names[20]) + 1} is 'zz'"):
        next(read_blocks(path))


def test_rows_of_a_modulo_fit_the_files(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(good_line(first_category="ffffffff"))
    preprocess([tmp_path / "log"], tmp_path / "npy", Modulo(2**31))
    assert np.load(tmp_path / "npy" / "day_0_sparse.npy")[0, 0] == 2**31 - 1
    with pytest.raises(DataError, match=r"1,099,511,627,776 rows do not fit .* at most 2,147,483,648"):
        Modulo(2**40)
    record = json.loads((tmp_path / "npy" / "tables.json").read_text())
    record["encoding"]["rows"] = 2**40
    (tmp_path / "npy" / "tables.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"tables\.json': 'encoding.rows' is 1099511627776; it must be at most"):
        encoding_of(tmp_path / "npy")


def test_integers_written_as_floats_are_integers(tmp_path: Path) -> None:
    path = tmp_path / "pandas.csv"
    path.write_text(",".join(["1", "3.0", "-1.0", *[""] * 11, *["ff"] * 26]) + "\n")
    assert next(read_blocks(path)).integers_BF[0].tolist() == [3, -1, *[0] * 11]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (good_line().encode() * 3 + b"1\t2\t3\n", "line 4 has 3 columns, not 40"),
        (good_line().encode() * 3 + good_line().encode()[:80], "line 4 has "),
        (good_line().encode() * 3 + good_line().encode()[:80], "truncated?"),
        (good_line().encode() + b"\n" + good_line().encode(), "line 2 has 1 columns"),
        (good_line().encode() * 2 + good_line(first_category="68fd1g64").encode(), "line 3 column 15 is '68fd1g64'"),
        (good_line(first_category="068fd1e64").encode(), "column 15 is '068fd1e64'"),
        (good_line(first_category=":").encode(), "column 15 is ':'"),
        (good_line(first_category="`").encode(), "column 15 is '`'"),
        (good_line().encode() + good_line(2).encode(), "line 2 column 1 is '2', which is no label"),
        (good_line(2).encode() + good_line().encode(), "line 1 column 1 is '2', which is no label"),
        (good_line()[1:].encode() + good_line().encode(), "line 1 column 1 is '', which is no label"),
        (good_line().encode() * 2 + good_line()[1:].encode(), "line 3 column 1 is '', which is no label"),
        (b"nan" + good_line()[1:].encode(), "line 1 column 1 is 'nan'"),
        (good_line().replace("\t5", "\tfive", 1).encode(), "line 1 column 2 is 'five'"),
        (good_line().replace("\t5", "\t1.5", 1).encode(), "line 1 column 2 is '1.5'"),
        (good_line().replace("\t5", "\tnan", 1).encode(), "line 1 column 2 is 'nan'"),
        (good_line().replace("\t5", "\tinf", 1).encode(), "line 1 column 2 is 'inf'"),
        (good_line().replace("\t5", "\t-", 1).encode(), "line 1 column 2 is '-'"),
        (good_line().replace("\t5", "\t99999999999", 1).encode(), "no integer of 32 bits"),
        (good_line().replace("\t5", "\t ", 1).encode(), "line 1 column 2 is ' '"),
        (good_line()[2:].encode(), "without labels"),
        (b"\x89PNG\r\n\x1a\n" + bytes(200), "line 1 has 1 columns"),
        (bytes(200_000), "is not a click log"),
        (gzip.compress(good_line().encode() * 5000)[:300], "truncated gzip file: reading stopped near byte"),
        (b"\x1f\x8b" + bytes(100), "damaged or truncated gzip file"),
        (b"\t".join([b"label", *(b"c%d" % i for i in range(39))]) + b"\n", "a header and no lines"),
        (b"\t".join([b"label"] * 40) + b"\n", "line 1 names columns 'label'"),
        (
            b",".join([b"label", *(b"I%d" % i for i in range(13)), *(b"C%d" % i for i in range(1, 26)), b"C25"]),
            "must name",
        ),
        (
            b",".join([b"label", *(b"i%d" % i for i in range(13)), *(b"c%d" % i for i in range(25)), b"c40"]),
            "must name",
        ),
    ],
)
def test_files_that_cannot_be_used_are_named_and_leave_nothing(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(text)
    with pytest.raises(DataError) as caught:
        preprocess([path], tmp_path / "out", Contiguous(1))
    assert "log.txt" in str(caught.value) and message in str(caught.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["log.txt"]


@settings(max_examples=60, deadline=None)
@given(chunks=st.lists(st.lists(st.integers(0, 20), max_size=50), max_size=6), min_frequency=st.integers(1, 5))
def test_a_vocabulary_has_a_row_for_each_frequent_id(chunks: list[list[int]], min_frequency: int) -> None:
    counter = FrequencyCounter()
    for chunk in chunks:
        counter.add(np.array(chunk, np.uint32))
    vocabulary = counter.vocabulary(min_frequency)
    counts = Counter(raw for chunk in chunks for raw in chunk if raw)
    kept = [raw for raw, count in counts.items() if count >= min_frequency]
    rows = dict(zip(range(25), vocabulary.encode(np.arange(25, dtype=np.uint32)).tolist(), strict=True))
    assert rows[0] == 0
    assert {raw for raw, row in rows.items() if row == 1} == set(range(1, 25)) - set(kept)
    assert sorted(rows[raw] for raw in kept) == list(range(2, 2 + len(kept)))
    assert vocabulary.num_rows == 2 + len(kept)
    by_row = sorted(kept, key=lambda raw: rows[raw])
    assert [counts[raw] for raw in by_row] == sorted((counts[raw] for raw in kept), reverse=True)


def test_counting_in_many_merges_is_counting_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from dlrm_autoshard.data.sources.criteo import vocabulary

    monkeypatch.setattr(vocabulary, "PENDING_AT_LEAST", 100)
    raw = np.random.default_rng(0).integers(0, 2**32, 500, dtype=np.uint32).repeat(20)
    np.random.default_rng(1).shuffle(raw)
    counter = FrequencyCounter()
    for chunk in np.split(raw, 100):
        counter.add(chunk)
    assert counter.vocabulary(20).num_rows == 502 and counter.vocabulary(21).num_rows == 2


@pytest.mark.parametrize("encoding", [Contiguous(2), Modulo(50)])
def test_the_layout_holds_what_the_text_said(tmp_path: Path, encoding: Contiguous | Modulo) -> None:
    paths = [tmp_path / "day_0", tmp_path / "day_1"]
    for seed, path in enumerate(paths):
        write_sample_text(path, 300, seed)
    progress: list[tuple[str, int, int]] = []
    result = preprocess(paths, tmp_path / "out", encoding, lambda *step: progress.append(step))
    assert result.rows_per_day == [300, 300]
    assert progress and all(done <= total for _, done, total in progress) and progress[-1][1] == progress[-1][2]
    assert json.loads((tmp_path / "out" / "tables.json").read_text())["num_embeddings"] == result.table_rows

    fields = [[line.split("\t") for line in path.read_text().splitlines()] for path in paths]
    counts = [Counter(row[14 + t] for day in fields for row in day) for t in range(26)]
    for day in range(2):
        parts = ("dense", "sparse", "labels")
        dense, sparse, labels = (np.load(tmp_path / "out" / f"day_{day}_{part}.npy") for part in parts)
        assert (dense.dtype, sparse.dtype, labels.dtype) == (np.float32, np.int32, np.int32)
        assert (dense.shape, sparse.shape, labels.shape) == ((300, 13), (300, 26), (300, 1))
        assert labels[:, 0].tolist() == [int(row[0]) for row in fields[day]]
        wanted = np.log([[max(int(x or 0), -2) + 3 for x in row[1:14]] for row in fields[day]])
        np.testing.assert_allclose(dense, wanted, rtol=1e-6, atol=1e-6)
        for i, row in enumerate(fields[day]):
            for t, (word, got) in enumerate(zip(row[14:], sparse[i].tolist(), strict=True)):
                if isinstance(encoding, Modulo):
                    assert got == int(word or "0", 16) % 50
                elif not word:
                    assert got == 0
                else:
                    assert (got == 1) == (counts[t][word] < 2) and got < result.table_rows[t]


def test_same_category_same_row_in_all_days(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    paths[0].write_text(good_line(first_category="aaaaaaaa") + good_line(first_category="bbbbbbbb"))
    paths[1].write_text(good_line(first_category="bbbbbbbb") + good_line(first_category="cccccccc"))
    preprocess(paths, tmp_path / "out", Contiguous(1))
    first, second = (np.load(tmp_path / "out" / f"day_{day}_sparse.npy")[:, 0].tolist() for day in range(2))
    assert first[1] == second[0] == 2 and {first[0], second[1]} == {3, 4}


def test_an_output_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(good_line())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    with pytest.raises(DataError, match=r"out' exists and is not empty"):
        preprocess([tmp_path / "log"], tmp_path / "out", Modulo(10))
    with pytest.raises(DataError, match=r"missing' does not exist"):
        preprocess([tmp_path / "missing"], tmp_path / "new", Modulo(10))


def test_a_kill_leaves_nothing_that_would_be_read_and_the_next_run_succeeds(tmp_path: Path) -> None:
    write_sample_text(tmp_path / "log", 10_000)
    command = [sys.executable, "-m", "dlrm_autoshard.commands.main", "data", "criteo", *["log"] * 30, "--out", "out"]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
    deadline = time.monotonic() + 60
    while not (tmp_path / "out.partial" / "day_2_dense.npy").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    preprocess([tmp_path / "log"], tmp_path / "out", Modulo(100))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["log", "out"]


@pytest.mark.parametrize("encoding", [Contiguous(2), Modulo(100)])
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, encoding: Contiguous | Modulo, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlrm_autoshard.data.sources.criteo import preprocess as preprocessing
    from dlrm_autoshard.data.sources.criteo import vocabulary

    monkeypatch.setattr(vocabulary, "PENDING_AT_LEAST", 1000)
    monkeypatch.setattr(preprocessing, "ROWS_AT_A_TIME", 1000)
    write_sample_text(tmp_path / "small", 2_500)
    (tmp_path / "large").write_bytes((tmp_path / "small").read_bytes() * 8)

    def peak_bytes(name: str) -> int:
        tracemalloc.start()
        preprocess([tmp_path / name], tmp_path / f"{name}.out", encoding)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes("small")
    (tmp_path / "small.out").rename(tmp_path / "first.out")
    grown = peak_bytes("large") - peak_bytes("small")
    assert grown < 17_500 * 160 / 4, "held in memory, the further lines' output alone would be four times as much"


def test_the_command_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for day in (10, 9):
        write_sample_text(tmp_path / f"day_{day}", day)
    assert main(["data", "criteo", *map(str, sorted(tmp_path.glob("day_*"))), "--out", str(tmp_path / "out")]) == 0
    assert "19 samples in 2 days" in capsys.readouterr().out
    assert len(np.load(tmp_path / "out" / "day_0_labels.npy")) == 9, "day_9 comes before day_10"
    assert main(["data", "criteo", str(tmp_path / "day_9"), "--out", str(tmp_path / "out")]) == 2
    assert "not empty" in capsys.readouterr().err


def test_later_days_take_the_rows_that_a_model_was_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, later = "68fd1e64", "0badcafe"
    (tmp_path / "first").write_text(good_line(1, known) * 3 + good_line(0, "0000000b") * 4)
    (tmp_path / "later").write_text("".join(good_line(0, raw) for raw in ("0000000b", later, known, "")) * 5)
    data = ["data", "criteo"]
    assert main([*data, str(tmp_path / "first"), "--out", str(tmp_path / "a"), "--min-frequency", "2"]) == 0
    assert main([*data, str(tmp_path / "later"), "--out", str(tmp_path / "b"), "--like", str(tmp_path / "a")]) == 0
    assert "20 samples in 1 day" in capsys.readouterr().out
    first, ids = (np.load(tmp_path / out / "day_0_sparse.npy")[:4, 0].tolist() for out in ("a", "b"))
    assert (first, ids) == ([3, 3, 3, 2], [2, 1, 3, 0]), "often as it comes there, the later category is a rare one"
    records = [json.loads((tmp_path / out / "tables.json").read_text()) for out in ("a", "b")]
    assert [record["num_embeddings"][:2] for record in records] == [[4, 3], [4, 3]]
    assert main([*data, str(tmp_path / "first"), "--out", str(tmp_path / "c"), "--like", str(tmp_path / "b")]) == 0
    assert np.array_equal(np.load(tmp_path / "c" / "day_0_sparse.npy"), np.load(tmp_path / "a" / "day_0_sparse.npy"))


def test_later_days_by_modulo_and_folders_that_tell_of_no_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sample_text(tmp_path / "log", 50)
    preprocess([tmp_path / "log"], tmp_path / "modulo", Modulo(10))
    again = ["data", "criteo", str(tmp_path / "log"), "--out", str(tmp_path / "out"), "--like"]
    assert main([*again, str(tmp_path / "modulo")]) == 0
    assert np.load(tmp_path / "out" / "day_0_sparse.npy").max() == 9
    capsys.readouterr()
    preprocess([tmp_path / "log"], tmp_path / "counted", Contiguous(2))
    with np.load(tmp_path / "counted" / "categories.npz") as arrays:
        np.savez(tmp_path / "counted" / "categories.npz", allow_pickle=False, **{**arrays, "3": arrays["3"][1:]})
    write_sample_layout(tmp_path / "made-up", [10])
    for folder, said in (("counted", "table 3"), ("made-up", "describes no encoding"), ("none", "none/tables.json")):
        assert main([*again, str(tmp_path / folder)]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
