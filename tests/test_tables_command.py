"""`dlrm-autoshard tables`: files of dlrm_datasets as a whole batch, and made-up pools of the shape one asks for."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_autoshard.commands.main import main
from dlrm_autoshard.planner.dreamshard.pool import TablePool, reuse_shares, synthetic_pool
from dlrm_autoshard.planner.dreamshard.published import PUBLISHED, published_of
from dlrm_autoshard.tables import measure_table_stats


def tables(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert main(["tables", *map(str, arguments), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["tables"]
    return found


def trace(path: Path, samples: int, seed: int, *, old_format: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """A file of three tables, the last without ids. As the files of a year are named: packed where it ends in .gz."""
    random = np.random.default_rng(seed)
    lengths_TB = random.integers(0, 5, (3, samples)) * np.array([[1], [4], [0]])
    offsets = np.concatenate([[0], lengths_TB.ravel().cumsum()])
    values_N = random.integers(0, 500, offsets[-1])
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    content = tuple(map(torch.from_numpy, (values_N, offsets, lengths_TB)))
    torch.save(content, plain, _use_new_zipfile_serialization=not old_format)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()
    return lengths_TB, values_N


@pytest.mark.parametrize("name", ["2021/fbgemm_t3_bs2000.pt.gz", "2022/fbgemm_t3_bs2000_0.pt.gz", "plain.pt"])
@pytest.mark.parametrize("old_format", [False, True])
@pytest.mark.parametrize("asked", [(), ("--batch-size", 2000)])
def test_a_files_statistics_are_of_its_whole_batch(
    name: str, old_format: bool, asked: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    batch = trace(tmp_path / name, 2000, seed=0, old_format=old_format)
    wanted = [stats.to_json() for stats in measure_table_stats(*batch)]
    assert [row["stats"] for row in tables(capsys, tmp_path / name, *asked)] == wanted


def test_a_batch_may_reach_into_the_next_file_and_not_beyond_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "a.pt", tmp_path / "b.pt"
    (lengths, values), (more, others) = trace(files[0], 90, seed=1), trace(files[1], 60, seed=2)
    first = [stats.to_json() for stats in measure_table_stats(lengths, values)]
    assert [row["stats"] for row in tables(capsys, *files)] == first
    both = tables(capsys, *files, "--batch-size", 150)
    assert {row["stats"]["batch_size"] for row in both} == {150}
    assert both[1]["stats"]["mean_pooling"] == (lengths[1].sum() + more[1].sum()) / 150
    parts = [ids[counts[0].sum() : counts[:2].sum()] for counts, ids in ((lengths, values), (more, others))]
    unique = len(np.unique(np.concatenate(parts)))
    assert both[1]["stats"]["mean_reuse"] == sum(map(len, parts)) / unique
    assert main(["tables", *map(str, files), "--batch-size", "151"]) == 2
    assert "hold 150 samples; --batch-size is 151" in capsys.readouterr().err


def test_fp16_tables_take_half_the_bytes_and_cost_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace(tmp_path / "a.pt", 50, seed=0)
    (tmp_path / "t.csv").write_text("name,num_embeddings\nuser,1000\n")
    for chosen in ([tmp_path / "a.pt"], ["--from-csv", tmp_path / "t.csv"], ["--synthetic", 3]):
        known = tables(capsys, *chosen, "--batch-size", 50)
        assert {row["dtype"] for row in known} == {"fp32"}
        assert tables(capsys, *chosen, "--batch-size", 50, "--dtype", "fp16") == [
            {**row, "dtype": "fp16"} for row in known
        ]
    bytes_of, ms_of = {}, {}
    for dtype in ("fp32", "fp16"):
        file = tmp_path / f"{dtype}.json"
        tables(capsys, "--synthetic", 8, "--batch-size", 4096, "--dtype", dtype, "--out", file)
        bytes_of[dtype] = sum(table.weight_bytes for table in TablePool.load(file).tables)
        assert main(["plan", "--tables", str(file), "--devices", "2", "--algorithm", "search", "--json"]) == 0
        ms_of[dtype] = json.loads(capsys.readouterr().out)["predicted_ms"]
    assert bytes_of["fp32"] == 2 * bytes_of["fp16"]
    assert ms_of["fp16"] < ms_of["fp32"]


def test_made_up_tables_reach_as_far_as_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = ["--rows", "1e3:1e8", "--dim", "16:256", "--pooling", "0:200", "--dtype", "fp16", "--batch-size", 4096]
    rows = tables(capsys, "--synthetic", 400, *wide, "--out", tmp_path / "wide.json")
    reached = {
        "rows": [row["num_embeddings"] for row in rows],
        "dims": [row["embedding_dim"] for row in rows],
        "pooling": [row["stats"]["mean_pooling"] for row in rows],
    }
    ends = {name: (min(values), max(values)) for name, values in reached.items()}
    assert 1e3 <= ends["rows"][0] < 2e3 and 5e7 < ends["rows"][1] <= 1e8
    assert ends["dims"] == (16, 256) and all(dim % 4 == 0 for dim in reached["dims"])
    assert 0 <= ends["pooling"][0] < 0.1 and 150 < ends["pooling"][1] <= 200
    planned = ["plan", "--tables", str(tmp_path / "wide.json"), "--devices", "8", "--algorithm", "lookup_greedy"]
    assert main([*planned, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted_ms"] > 0


def test_one_number_is_of_all_made_up_tables(capsys: pytest.CaptureFixture[str]) -> None:
    rows = tables(capsys, "--synthetic", 4, "--rows", "1000", "--dim", "64", "--pooling", "0")
    assert {(row["num_embeddings"], row["embedding_dim"]) for row in rows} == {(1000, 64)}
    assert all(row["stats"]["mean_pooling"] == 0 and sum(row["stats"]["reuse_histogram"]) == 0 for row in rows)
    assert [row["stats"]["mean_pooling"] for row in tables(capsys, "--synthetic", 2, "--pooling", "5")] == [5, 5]


def test_defaults_are_those_of_synthetic_pool(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables(capsys, "--synthetic", 9, "--seed", 3) == synthetic_pool(9, 3, 65536).to_json()["tables"]


@pytest.mark.parametrize(("number", "year"), [(856, 2021), (788, 2022)])
def test_made_up_pools_are_like_what_is_published_and_say_so(
    number: int, year: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published, file = PUBLISHED[year], tmp_path / "pool.json"
    assert main(["tables", "--synthetic", str(number), "--out", str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"made up: {number} tables" in printed and f"dlrm_datasets {year}" in printed
    pool = TablePool.load(file)
    assert pool.made_up and pool.chosen([0]).made_up == pool.made_up, "who reads the file can tell"
    assert len(pool) == number == published.num_tables
    assert {stats.batch_size for stats in pool.stats} == {published.batch_size}
    assert np.mean([stats.mean_pooling for stats in pool.stats]) == pytest.approx(published.mean_pooling, rel=0.2)
    shares, mean_reuse = reuse_shares(pool.stats)
    assert mean_reuse == pytest.approx(published.mean_reuse, rel=0.25)
    assert np.abs(np.array(shares) - published.reuse_shares).sum() / 2 < 0.25  # total variation


def test_what_is_published_agrees_with_itself() -> None:
    for published in PUBLISHED.values():
        assert sum(published.reuse_shares) == pytest.approx(1, abs=0.01)
    assert published_of(788) == PUBLISHED[2022] and published_of(24) == PUBLISHED[2021]


def test_tables_of_a_file_are_not_called_made_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace(tmp_path / "a.pt", 50, seed=0)
    assert main(["tables", str(tmp_path / "a.pt"), "--out", str(tmp_path / "t.json")]) == 0
    assert "made up" not in capsys.readouterr().out and "made_up" not in (tmp_path / "t.json").read_text()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("a.pt --rows 10:20", "--rows and --pooling are for --synthetic"),
        ("--from-csv t.csv --pooling 3", "--rows and --pooling are for --synthetic"),
        ("a.pt --dim 16:64", "--dim is 16:64: only --synthetic draws dims"),
        ("--synthetic 3 --dim 6:64", "--dim is 6:64; fbgemm needs a multiple of 4"),
        ("--from-run r --dtype fp16", "leave out --dim, --dtype and --batch-size"),
    ],
)
def test_what_would_be_ignored_is_refused(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", *line.split()]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("text", ["x", "5:", "9:3", "-1:3", "nan", "1:1e99"])
def test_a_range_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["tables", "--synthetic", "3", f"--pooling={text}"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "argument --pooling" in said and "Traceback" not in said
