"""Whatever a file from outside holds: it is used, or a sentence names it; no traceback, no hang, no memory without end.

MUTATIONS=1600 pytest -m slow tests/test_mutated_inputs.py -s      # of each kind; prints the counts
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_autoshard.config import TablesConfig, load_config
from dlrm_autoshard.config_data import CriteoData, DlrmDatasetsData, MovielensData, ParquetData
from dlrm_autoshard.data.batch import DataSource
from dlrm_autoshard.data.loader import Loader
from dlrm_autoshard.data.sources.criteo.preprocess import Contiguous, preprocess
from dlrm_autoshard.data.sources.criteo.sample import write_sample_layout
from dlrm_autoshard.data.sources.criteo.source import CriteoSource
from dlrm_autoshard.data.sources.dlrm_datasets import DlrmDatasetsSource
from dlrm_autoshard.data.sources.movielens import MovielensSource
from dlrm_autoshard.data.sources.parquet import ParquetSource
from dlrm_autoshard.data.statistics import measure_stats
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.errors import UserError, in_a_sentence
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.costs.replay import CommsSample, ShardSample
from dlrm_autoshard.planner.dreamshard.drawn_tasks import TaskSet, draw_tasks
from dlrm_autoshard.planner.dreamshard.pool import TablePool, synthetic_pool
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.saved_state import load_planner
from dlrm_autoshard.probe.cost_log import CostLog
from dlrm_autoshard.training.trainer import Trainer
from tests.criteo_text import write_sample_text
from tests.mutations import mutated, retyped
from tests.report_records import make_profile, make_tables, write_run

CONFIGS = Path(__file__).parents[1] / "configs"
FEW = 40
SECONDS = 10  # of this process's own; six times that by the clock, for others may have the cores
MORE_MEMORY = 3 * 2**30


class Hang(BaseException):
    """Not an Exception: nothing may catch it."""


@dataclass(frozen=True)
class Kind:
    """make: writes valid files into a folder. use: reads them as a command would. mutate: names of those to change.
    change: of a file's bytes."""

    make: Callable[[Path], object]
    use: Callable[[Path], object]
    mutate: str
    is_json: bool = False
    change: Callable[[bytes, random.Random, bool], bytes] = mutated


def _make_plan(folder: Path) -> None:
    ShardingPlan({f"t_{i}": i % 3 for i in range(6)}, 3).save(folder / "plan.json")


def _make_pool(folder: Path) -> None:
    synthetic_pool(6, 0, 4096).save(folder / "tables.json")


def _make_tasks(folder: Path) -> None:
    draw_tasks(synthetic_pool(8, 0, 4096), 3, 2, seed=0, batch_size=4096).save(folder / "tasks.json")


def _samples() -> list[ShardSample | CommsSample]:
    tables, stats = make_tables(3)
    shards = [ShardSample((table,), (stat,), 512, 0.5, 0.7, 0.1) for table, stat in zip(tables, stats, strict=True)]
    return [*shards, CommsSample((16, 32), 512, (0.1, 0.2), (0.1, 0.2))]


def _make_planner(folder: Path) -> None:
    planner = Planner("search")
    planner.costs.replay.add(_samples())
    (folder / "planner.json").write_text(json.dumps(planner.state_dict()))


_PLANNER = Planner("search")


def _make_log(folder: Path) -> None:
    CostLog(folder, {"cpu": "x"}).append(_samples())


def _use_log(folder: Path) -> None:
    log = CostLog(folder, {"cpu": "x"})
    log.read()
    assert all(log.path.name in said for said in log.left_out)


def _report(form: str) -> Callable[[Path], object]:
    def use(folder: Path) -> None:
        from dlrm_autoshard.commands import report

        parser = argparse.ArgumentParser()
        report.add_parser(parser.add_subparsers())
        arguments = parser.parse_args(["report", str(folder), *([form] if form else [])])
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            arguments.run(arguments)
        assert "\x1b" not in said.getvalue()
        if form == "--json":
            assert not {"NaN", "Infinity"} & set(said.getvalue().replace(",", " ").split())
            json.loads(said.getvalue())

    return use


def _make_run(folder: Path) -> None:
    write_run(folder, epochs=2, tables=4)
    assert make_profile() is not None


def _make_criteo(folder: Path) -> None:
    shutil.rmtree(folder)
    write_sample_layout(folder, [30, 20])


def _read_some(source: DataSource) -> None:
    for split in ("train", "val", "test"):
        with Loader(source, split, 0, 16, 0, 1, prefetch_batches=0) as loader:
            for number, _ in enumerate(loader):
                if number == 2:
                    break


def _use_criteo(folder: Path) -> None:
    for multi_hot in (False, True):
        _read_some(CriteoSource(CriteoData(source="criteo", dir=str(folder), multi_hot=multi_hot), TablesConfig()))


def _make_trace(folder: Path) -> None:
    lengths = torch.randint(0, 4, (3, 40), generator=torch.Generator().manual_seed(0))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.flatten().cumsum(0)])
    torch.save((torch.arange(int(offsets[-1])), offsets, lengths), folder / "trace.pt")
    (folder / "packed.pt.gz").write_bytes(gzip.compress((folder / "trace.pt").read_bytes()))


def _use_trace(folder: Path) -> None:
    (folder / "packed.pt").unlink(missing_ok=True)
    for name in ("trace.pt", "packed.pt.gz"):
        data = DlrmDatasetsData(source="dlrm_datasets", files=[str(folder / name)])
        _read_some(DlrmDatasetsSource(data, TablesConfig()))


def _make_movielens(folder: Path) -> None:
    users = [f"{i}\t{20 + i}\tM\tother\t{10000 + i}" for i in range(1, 6)]
    items = [f"{i}\tSome film {i}\t19{80 + i}\tDrama War" for i in range(1, 8)]
    ratings = [f"{1 + i % 5}\t{1 + i % 7}\t{1 + i % 5}\t{880_000_000 + 1000 * i}" for i in range(60)]
    texts = {
        "user": ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token", *users],
        "item": ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq", *items],
        "inter": ["user_id:token\titem_id:token\trating:float\ttimestamp:float", *ratings],
    }
    for kind, lines in texts.items():
        (folder / f"ml-100k.{kind}").write_text("\n".join(lines) + "\n")


def _make_parquet(folder: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    history = [list(range(row % 4)) for row in range(60)]
    columns = {"click": [row % 2 for row in range(60)], "age": list(range(60)), "city": ["a", "b", "c"] * 20}
    table = pyarrow.table({**columns, "history": pyarrow.array(history, pyarrow.list_(pyarrow.int64()))})
    parquet.write_table(table, folder / "day.parquet", row_group_size=20)


def _use_parquet(folder: Path) -> None:
    tables = [{"column": "city", "num_embeddings": 9}, {"column": "history", "num_embeddings": 4}]
    path = str(folder / "day.parquet")
    data = {"source": "parquet", "train": [path], "labels": {"click": 1}, "dense": ["age"], "tables": tables}
    _read_some(ParquetSource(ParquetData.model_validate(data), TablesConfig()))


def _use_parquet_by_each_remedy(folder: Path) -> None:
    """As a job does that counts ids first; refused where one of them is."""
    path, refused = str(folder / "day.parquet"), None
    for remedy, hashed in (("error", None), ("clip", None), ("hash", None), ("error", True)):
        tables = [{"column": c, "num_embeddings": n, "hash": hashed} for c, n in (("city", 9), ("history", 4))]
        data = ParquetData.model_validate(
            {"source": "parquet", "train": [path], "labels": {"click": 1}, "dense": ["age"], "tables": tables,
             "on_bad_id": remedy}
        )  # fmt: skip
        try:
            source = ParquetSource(data, TablesConfig())
            measure_stats(source, 16, 2, on_bad_id=data.on_bad_id)
            with Loader(source, "train", 0, 16, 0, 1, prefetch_batches=0, on_bad_id=data.on_bad_id) as loader:
                for batch in loader:
                    assert (
                        batch.values_N.numel() == 0 or 0 <= int(batch.values_N.min()) <= int(batch.values_N.max()) < 9
                    )
        except UserError as error:
            refused = error
    if refused is not None:
        raise refused


def _use_text(folder: Path) -> None:
    shutil.rmtree(folder / "out", ignore_errors=True)
    preprocess([folder / "train.txt"], folder / "out", Contiguous(1))


def _use_override(folder: Path) -> None:
    override = (folder / "override").read_bytes().decode("utf-8", "surrogateescape")
    load_config(CONFIGS / "debug_cpu.yaml", [override])


SMALL: dict[str, Any] = {
    "run": {"name": "job", "device": "cpu", "threads_per_rank": 1, "pin_cores": False, "seed": 1},
    "data": {
        "source": "synthetic", "num_dense": 3, "train_samples": 250, "val_samples": 20, "test_samples": 20, "seed": 1,
        "on_bad_id": "error", "prefetch_batches": 2, "drift": [{"epoch": 1, "permute_pooling": True}],
        "tables": [
            {"name": "user", "num_embeddings": 40, "embedding_dim": 8, "mean_pooling": 1.0, "alpha": 1.05},
            {"name": "item", "num_embeddings": 700, "mean_pooling": 2.5},
        ],
    },
    "tables": {"embedding_dim": 4, "dtype": "fp32", "optimizer": {"name": "sgd", "lr": 0.2, "eps": 1e-8}},
    "model": {"dense_arch_layer_sizes": [12, 4], "over_arch_layer_sizes": [10, 1], "interaction": "dot"},
    "dense_optimizer": {"name": "adam", "lr": 0.1, "weight_decay": 0.0},
    "schedule": {"warmup_steps": 1, "decay_start_step": 2, "decay_steps": 5, "decay_power": 2.0},
    "train": {"batch_size": 64, "eval_batch_size": 16, "eval_every_steps": 2, "log_every_steps": 1, "overlap": True},
    "checkpoint": {"every_steps": 2, "keep": 1, "keep_best": "auc", "asynchronous": False},
    "profile": {"every_steps": 1, "warmup_steps": 0, "trace_steps": []},
    "autoshard": {
        "enabled": True, "algorithm": "lookup_greedy", "memory_gib": 1.0, "budget_seconds": 1.0, "measure_plans": 2,
        "pinned": {"user": 0}, "reshard": {"every_steps": 2, "min_gain": 0.02}, "splits": {"min_dim": 8},
    },
}  # fmt: skip


def _make_small(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SMALL))


def _train_three_steps(folder: Path) -> None:
    """As one rank does, in this process; without the report, whose browser engine reserves more memory than _bounds."""
    few = ["train.max_steps=3", "train.epochs=1", "data.val_samples=20", "data.test_samples=20"]
    config = load_config(folder / "config.json", few)
    run_dir = folder / "runs"
    try:
        run_dir.mkdir()
        with contextlib.redirect_stdout(io.StringIO()), Runtime.start(config.run) as runtime:
            Trainer(config, runtime, run_dir).run()
    finally:
        shutil.rmtree(run_dir)


KINDS = {
    "plan": Kind(_make_plan, lambda f: ShardingPlan.load(f / "plan.json"), "plan.json", True),
    "tables": Kind(_make_pool, lambda f: TablePool.load(f / "tables.json"), "tables.json", True),
    "tasks": Kind(_make_tasks, lambda f: TaskSet.load(f / "tasks.json").train, "tasks.json", True),
    "planner": Kind(_make_planner, lambda f: load_planner(_PLANNER, f / "planner.json"), "planner.json", True),
    "cost log": Kind(_make_log, _use_log, "costs-*.jsonl", True),
    "report": Kind(_make_run, _report(""), "**/*.jsonl", True),
    "report --json": Kind(_make_run, _report("--json"), "**/*.jsonl", True),
    "report --csv": Kind(_make_run, _report("--csv"), "costs/*.jsonl", True),
    "report's config": Kind(_make_run, _report(""), "config.yaml"),
    "criteo npy, npz": Kind(_make_criteo, _use_criteo, "*", True),
    "pt, pt.gz": Kind(_make_trace, _use_trace, "*"),
    "movielens": Kind(
        _make_movielens,
        lambda f: _read_some(MovielensSource(MovielensData(source="movielens", dir=str(f)), TablesConfig())),
        "ml-100k.*",
    ),
    "parquet": Kind(_make_parquet, _use_parquet, "day.parquet"),
    "parquet types": Kind(_make_parquet, _use_parquet_by_each_remedy, "day.parquet", change=retyped),
    "criteo text": Kind(lambda f: write_sample_text(f / "train.txt", 20), _use_text, "train.txt"),
    "yaml": Kind(
        lambda f: shutil.copy(CONFIGS / "synthetic_skewed.yaml", f / "config.yaml"),
        lambda f: load_config(f / "config.yaml"),
        "config.yaml",
    ),
    "override": Kind(
        lambda f: (f / "override").write_text("tables.embedding_dims={user: 32, item: 16}"),
        _use_override,
        "override",
    ),
    "config, run": Kind(_make_small, _train_three_steps, "config.json", True),
}


@contextlib.contextmanager
def _bounds() -> Iterator[None]:
    """Of time and of memory."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Hang

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = [signal.signal(number, late) for number in (signal.SIGALRM, signal.SIGPROF)]
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY, hard))
    signal.alarm(6 * SECONDS)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in zip((signal.SIGALRM, signal.SIGPROF), before, strict=True):
            signal.signal(number, handler)


def outcome(use: Callable[[Path], object], folder: Path) -> str:
    """ "used", "refused", or what must not be: "hang", or a traceback."""
    try:
        with _bounds():
            use(folder)
        return "used"
    except Hang:
        return "hang\n" + traceback.format_exc()[-1500:]
    except Exception as error:
        said = in_a_sentence(error)
        if said is None:
            return "traceback\n" + traceback.format_exc()[-1500:]
        if not said.replace("\n", "").isprintable() or len(said) > 4000:
            return f"not fit for a terminal: {said[:200]!r}"
        named = [path.name for path in folder.rglob("*")] + ["override", "config", "table '", folder.name]
        named += [f"{section}." for section in SMALL]
        return "refused" if any(name in said for name in named) else f"names no file: {said[:500]}"


def _run(kind: Kind, folder: Path, count: int, seed: int) -> collections.Counter[str]:
    """Outcomes of so many mutations. Those that must not be are kept beside the test, as they were."""
    folder.mkdir()
    kind.make(folder)
    assert outcome(kind.use, folder) == "used"
    valid = {path: path.read_bytes() for path in sorted(folder.glob(kind.mutate)) if path.is_file()}
    found: collections.Counter[str] = collections.Counter()
    draw = random.Random(seed)
    for number in range(count):
        path = draw.choice(list(valid))
        is_json = kind.is_json and path.suffix in (".json", ".jsonl")
        path.write_bytes(kind.change(valid[path], draw, is_json))
        result = outcome(kind.use, folder)
        found[result] += 1
        if result not in ("used", "refused"):
            shutil.copy(path, folder.parent / f"{number}-{path.name}")
        path.write_bytes(valid[path])
    return found


def _check(name: str, folder: Path, count: int, seed: int) -> None:
    found = _run(KINDS[name], folder, count, seed)
    bad = {result: times for result, times in found.items() if result not in ("used", "refused")}
    print(f"{name}: {count} mutations, {found['used']} used, {found['refused']} refused, {sum(bad.values())} wrong")
    assert not bad, "\n\n".join(f"{times} x {result}" for result, times in bad.items())


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_used_or_named(name: str, tmp_path: Path) -> None:
    _check(name, tmp_path / "files", FEW, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KINDS)
def test_twenty_thousand_damaged_files_are_used_or_named(name: str, tmp_path: Path) -> None:
    _check(name, tmp_path / "files", int(os.environ.get("MUTATIONS", "1400")), seed=int(os.environ.get("SEED", "1")))


def refusal(use: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        use()
    return str(caught.value)


def test_what_was_taken_in_silence_is_refused_by_name(tmp_path: Path) -> None:
    _make_plan(tmp_path)
    plan = tmp_path / "plan.json"
    whole = plan.read_text()
    for rank, said in (("0.9", "'rank_of.t_1' is 0.9"), ("true", "'rank_of.t_1' is True"), ("-1", "is -1")):
        plan.write_text(whole.replace('"t_1": 1', f'"t_1": {rank}'))
        complaint = refusal(lambda: ShardingPlan.load(plan))
        assert said in complaint and "plan.json" in complaint
    plan.write_text(whole.replace('"t_1"', '"t_0"'))
    assert "the key 't_0' twice" in refusal(lambda: ShardingPlan.load(plan))

    _make_pool(tmp_path)
    pool = tmp_path / "tables.json"
    record = json.loads(pool.read_text())
    for value, said in ((float("nan"), "holds NaN"), (-1.0, "'tables.0.stats.mean_pooling' is -1.0")):
        record["tables"][0]["stats"]["mean_pooling"] = value
        pool.write_text(json.dumps(record))
        assert said in refusal(lambda: TablePool.load(pool))

    _make_tasks(tmp_path)
    tasks = tmp_path / "tasks.json"
    record = json.loads(tasks.read_text())
    tasks.write_text(json.dumps({**record, "train": [[-1]]}))
    assert "'train.0.0' is -1; it must be 0 or more" in refusal(lambda: TaskSet.load(tasks))

    _make_movielens(tmp_path)
    ratings = tmp_path / "ml-100k.inter"
    ratings.write_text(ratings.read_text().replace("2\t2\t2\t", "2\t2\t99\t", 1))
    assert "has the rating 99; it must be 1 to 5" in refusal(lambda: KINDS["movielens"].use(tmp_path))


def test_a_byte_order_mark_costs_no_line_and_uint64_ids_are_ids(tmp_path: Path) -> None:
    write_sample_text(tmp_path / "train.txt", 20)
    (tmp_path / "train.txt").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "train.txt").read_bytes())
    assert preprocess([tmp_path / "train.txt"], tmp_path / "npy", Contiguous(1)).rows_per_day == [20]
    source = CriteoSource(CriteoData(source="criteo", dir=str(tmp_path / "npy")), TablesConfig())
    signed = source.read("train", 0, 0, 8).values_N
    path = tmp_path / "npy" / "day_0_sparse.npy"
    np.save(path, np.load(path).astype(np.uint64))
    source = CriteoSource(CriteoData(source="criteo", dir=str(tmp_path / "npy")), TablesConfig())
    assert torch.equal(source.read("train", 0, 0, 8).values_N, signed.long())


def test_one_bad_line_of_a_cost_log_costs_that_line_and_is_named(tmp_path: Path) -> None:
    _make_log(tmp_path)
    log = CostLog(tmp_path, {"cpu": "x"})
    whole = log.read()
    for line in (b"5", b"{}", b"\xff", b"[[[["):
        log.path.write_bytes(log.path.read_bytes() + line + b"\n")
    assert log.read() == whole and len(log.left_out) == 4
    assert all(f"{log.path.name}', line " in said for said in log.left_out)


def test_names_cannot_steer_reports_or_terminals(tmp_path: Path) -> None:
    _make_run(tmp_path / "run")
    for path in (tmp_path / "run").glob("**/*.jsonl"):
        path.write_text(path.read_text().replace("cat_1", "[/]").replace("cat_2", "\\u001b[2J"))
    for form in ("", "--json", "--csv"):
        _report(form)(tmp_path / "run")
