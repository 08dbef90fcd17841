"""`dlrm-autoshard tables`: a data set, or a synthetic pool -> tables.json with what the 21 features are made of."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_autoshard.commands.arguments import OfRun, add_output, seed, with_progress
from dlrm_autoshard.commands.ranges import range_text, range_within
from dlrm_autoshard.errors import UserError

if TYPE_CHECKING:
    from dlrm_autoshard.config import TablesConfig
    from dlrm_autoshard.config_data import SyntheticTable
    from dlrm_autoshard.data.batch import DataSource
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.torchrec.module_file import Modules

_MOST_BYTES = 1 << 24
_BATCH_SIZE = 65536


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("tables", help="measure the tables of dlrm_datasets files, or make synthetic ones")
    parser.add_argument("files", nargs="*", metavar="FILE", help="fbgemm_t*_bs*.pt.gz files of dlrm_datasets")
    parser.add_argument("--from-run", type=Path, metavar="RUN", help="the tables of a run, as its data use them")
    parser.add_argument(
        "--from-csv", type=Path, metavar="FILE", help="columns name, num_embeddings; embedding_dim, mean_pooling, alpha"
    )
    parser.add_argument(
        "--synthetic",
        type=int,
        metavar="N",
        help="N made-up tables, with about the statistics that dlrm_datasets publishes: of 2022 where N is 788, its "
        "number of tables, else of 2021, which has 856",
    )
    parser.add_argument("--rows", type=range_within(1, 2**40), metavar="LOW:HIGH", help="synthetic (default 1e3:1e7)")
    parser.add_argument(
        "--dim",
        type=range_within(4, 2**16),
        metavar="D",
        help="embedding dim of tables from files (default 16); synthetic: LOW:HIGH, too (default 16:128)",
    )
    parser.add_argument(
        "--pooling", type=range_within(0, 1e5), metavar="LOW:HIGH", help="synthetic: mean ids a sample (default 1:60)"
    )
    parser.add_argument("--dtype", choices=["fp32", "fp16"], help="of the tables' weights (default fp32)")
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="samples measured: reuse grows with it (default: the first file; 65536 without one, 131072 for 788)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="of what is drawn: made-up tables, a CSV's ids")
    add_output(parser, "tables.json, for `tasks`, `plan` and `explain`")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    others = (arguments.synthetic, arguments.from_run, arguments.from_csv)
    if (bool(arguments.files), *(other is not None for other in others)).count(True) != 1:
        raise UserError("give files of dlrm_datasets, or --from-run RUN, or --from-csv FILE, or --synthetic N.")
    for name in arguments.files:
        if not name.endswith((".pt", ".pt.gz")):
            raise UserError(f"'{name}' is no .pt or .pt.gz file of dlrm_datasets; `tables` reads those.")
    of_run = (arguments.dim, arguments.dtype, arguments.batch_size)
    if arguments.from_run is not None and of_run != (None, None, None):
        raise UserError(
            "--from-run takes a run's tables as they are, at its own batch: leave --dim, --dtype and --batch-size out "
            "(`plan RUN --batch-size N` plans for another batch)."
        )
    if arguments.synthetic is None and (arguments.rows, arguments.pooling) != (None, None):
        raise UserError("--rows and --pooling are for --synthetic N; other tables have rows and pooling of their own.")
    pool = _pool(arguments)
    if arguments.out is not None:
        pool.save(arguments.out)
    if arguments.json:
        print(json.dumps(pool.to_json(), indent=1))
    else:
        _print(pool, arguments.out)
    return 0


def _pool(arguments: argparse.Namespace) -> TablePool:
    from dlrm_autoshard.config import TablesConfig

    if arguments.batch_size is not None and arguments.batch_size < 1:
        raise UserError(f"--batch-size is {arguments.batch_size}; it must be 1 or more.")
    if arguments.dim is not None and any(end % 4 for end in arguments.dim):
        raise UserError(f"--dim is {range_text(arguments.dim)}; fbgemm needs a multiple of 4.")
    if arguments.synthetic is not None:
        return _made_up(arguments)
    if arguments.from_run is not None:
        return tables_of_run(arguments.from_run, quiet=arguments.json).pool
    low, high = arguments.dim or (16, 16)
    if low < high:
        raise UserError(f"--dim is {range_text(arguments.dim)}: only --synthetic draws dims; give one of all tables.")
    shape = TablesConfig(embedding_dim=int(low), dtype=arguments.dtype or "fp32")
    if arguments.from_csv is not None:
        batch_size = arguments.batch_size or _BATCH_SIZE
        return pool_of_csv(arguments.from_csv, shape, batch_size, arguments.seed, arguments.json)
    return _pool_of_files(arguments.files, shape, arguments.batch_size, quiet=arguments.json)


def _made_up(arguments: argparse.Namespace) -> TablePool:
    from dataclasses import replace

    from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
    from dlrm_autoshard.planner.dreamshard.published import published_of

    if arguments.synthetic < 1:
        raise UserError(f"--synthetic is {arguments.synthetic}; it must be 1 or more.")
    like = published_of(arguments.synthetic)
    asked = {key: ends for key in ("rows", "pooling") if (ends := getattr(arguments, key)) is not None}
    if arguments.dim is not None:
        asked["dims"] = tuple(map(int, arguments.dim))
    pool = synthetic_pool(
        arguments.synthetic, arguments.seed, arguments.batch_size or like.batch_size, like=like, **asked
    )
    return replace(pool, tables=tuple(replace(table, dtype=arguments.dtype or "fp32") for table in pool.tables))


def tables_of_run(run: Path, quiet: bool) -> OfRun:
    """With reuse as in its first global batch and pooling as last measured."""
    from dataclasses import replace

    from dlrm_autoshard.config import load_config
    from dlrm_autoshard.data.open import open_source
    from dlrm_autoshard.records.run import RunRecord
    from dlrm_autoshard.tables import Shard
    from dlrm_autoshard.train.start_record import CONFIG

    record = RunRecord.load(run)
    if not record.epochs:
        raise UserError(f"'{run}' has no profiled epoch (profile.enabled: false), so nothing is known of its tables.")
    if not (run / CONFIG).exists():
        raise UserError(
            f"'{run}' has no {CONFIG}: it is of a training loop of its own, whose data cannot be read again. List its "
            "tables in a file (`tables --from-csv FILE`)."
        )
    config = load_config(run / CONFIG)
    pool = _measured(open_source(config.data, config.tables), record.last.batch_size, quiet)
    pooling = {Shard.parse(use.name).table: use.mean_pooling for use in record.last.tables}  # parts have their table's
    stats = [
        replace(s, mean_pooling=pooling.get(t.name, s.mean_pooling))
        for t, s in zip(pool.tables, pool.stats, strict=True)
    ]
    return OfRun(replace(pool, stats=tuple(stats)), config, record.last.hosts)


def pool_of_csv(path: Path, shape: TablesConfig, batch_size: int, seed: int, quiet: bool) -> TablePool:
    """Tables as a CSV file lists them, one a line, with ids drawn by their pooling and skew. UserError: the line."""
    import csv

    import pydantic

    from dlrm_autoshard.config_data import SyntheticTable
    from dlrm_autoshard.formats.json_file import NotReadable, read_bytes, text_of
    from dlrm_autoshard.formats.sentences import dotted, sentence
    from dlrm_autoshard.formats.yaml_file import parse_yaml

    try:
        lines = text_of(read_bytes(path, "CSV file", _MOST_BYTES)).splitlines()
        reader = csv.DictReader(lines, restkey="a cell without a column", strict=True)
        tables = []
        for row in reader:
            cells = {key: text for key, text in row.items() if text}
            values = {key: text if key == "name" else parse_yaml(str(text)) for key, text in cells.items()}
            tables.append(SyntheticTable.model_validate(values))
    except (NotReadable, csv.Error) as error:
        raise UserError(f"CSV file '{path}' {error}.") from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = f"CSV file '{path}', line {reader.line_num}"
        raise UserError(f"{where}: {sentence(dotted(first['loc']), first)}") from error
    if not tables:
        raise UserError(f"CSV file '{path}' lists no table; it needs the columns name and num_embeddings.")
    return _drawn(tables, shape, batch_size, seed, quiet)


def pool_of_modules(modules: Modules, batch_size: int, seed: int, quiet: bool) -> TablePool:
    """Tables of TorchRec modules, named as `table_key` says; ids are drawn for those without statistics."""
    from dlrm_autoshard.config import TablesConfig
    from dlrm_autoshard.config_data import SyntheticTable
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.tables import TableConfig, TableStats
    from dlrm_autoshard.torchrec.tables import table_key

    tables, known, guessed = [], {}, []
    for path, rows in modules.items():
        for row in rows:
            key, dim = table_key(path, row["name"], modules), row["embedding_dim"]
            shape = (key, row["num_embeddings"], dim)
            tables.append(TableConfig(*shape, row.get("pooling", "sum"), row.get("dtype", "fp32")))
            if "stats" in row:
                known[key] = TableStats.from_json(row["stats"])
            else:
                drawn = dict(zip(("name", "num_embeddings", "embedding_dim"), shape, strict=True))
                guessed.append(SyntheticTable.model_validate({**drawn, "mean_pooling": row.get("mean_pooling", 1.0)}))
    if guessed:
        pool = _drawn(guessed, TablesConfig(), batch_size, seed, quiet)
        known |= {table.name: stats for table, stats in zip(pool.tables, pool.stats, strict=True)}
    return TablePool(tuple(tables), tuple(known[table.name] for table in tables))


def _drawn(tables: list[SyntheticTable], shape: TablesConfig, batch_size: int, seed: int, quiet: bool) -> TablePool:
    from dlrm_autoshard.config_data import SyntheticData
    from dlrm_autoshard.data.open import open_source

    data = SyntheticData(source="synthetic", tables=tables, train_samples=batch_size, seed=seed)
    return _measured(open_source(data, shape), batch_size, quiet)


def _pool_of_files(files: list[str], shape: TablesConfig, batch_size: int | None, quiet: bool) -> TablePool:
    """Statistics over a whole batch, test samples too: a file is one batch of its job. One table's ids at a time."""
    from dlrm_autoshard.config_data import DlrmDatasetsData
    from dlrm_autoshard.data.sources.dlrm_datasets import DlrmDatasetsSource
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.tables import measure_table_stats

    source = DlrmDatasetsSource(DlrmDatasetsData(source="dlrm_datasets", files=files), shape)
    size, total = batch_size or source.batch_sizes[0], sum(source.batch_sizes)
    if size > total:
        raise UserError(
            f"the files hold {total:,} samples; --batch-size is {size:,}. Ask for less, or give more files."
        )
    stats = []
    for table in with_progress(range(len(source.tables)), len(source.tables), "measuring tables", quiet):
        stats += measure_table_stats(*source.bags(0, size, slice(table, table + 1)))
    return TablePool(source.tables, tuple(stats))


def _measured(source: DataSource, batch_size: int, quiet: bool) -> TablePool:
    """Statistics of each table over the first batch of the training samples."""
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.tables import measure_table_stats

    batch = source.read("train", 0, 0, min(batch_size, source.num_samples("train")))
    ends = batch.lengths_TB.sum(1).cumsum(0).tolist()
    stats = []
    for table in with_progress(range(len(source.tables)), len(source.tables), "measuring tables", quiet):
        first = ends[table - 1] if table else 0
        ids = batch.values_N[first : ends[table]].numpy()
        stats += measure_table_stats(batch.lengths_TB[table : table + 1].numpy(), ids)
    return TablePool(source.tables, tuple(stats))


def _print(pool: TablePool, out: Path | None) -> None:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from dlrm_autoshard.plan import gib
    from dlrm_autoshard.planner.dreamshard.pool import reuse_shares
    from dlrm_autoshard.planner.dreamshard.published import published_of

    console, published = Console(), published_of(len(pool))
    if pool.made_up:
        console.print(f"made up: {len(pool)} tables, with {pool.made_up}", highlight=False)
    table = Table("of the tables", "least", "10%", "median", "90%", "most", box=None, header_style="bold")
    columns = {
        "rows": [t.num_embeddings for t in pool.tables],
        "dim": [t.embedding_dim for t in pool.tables],
        "mean pooling": [s.mean_pooling for s in pool.stats],
        "mean reuse": [s.mean_reuse for s in pool.stats],
        "MiB": [t.weight_bytes / 2**20 for t in pool.tables],
    }
    for name, values in columns.items():
        table.add_row(
            name,
            *(f"{value:,.4g}" for value in np.percentile(np.array(values, dtype=np.float64), [0, 10, 50, 90, 100])),
        )
    console.print(table)
    shares, mean_reuse = reuse_shares(pool.stats)
    total = gib(sum(t.weight_bytes for t in pool.tables))
    console.print(
        f"{len(pool)} tables, {total}, mean reuse {mean_reuse:.2f} at batch {pool.stats[0].batch_size:,}\n"
        f"(dlrm_datasets {published.year}: {published.mean_reuse:.1f} at {published.batch_size:,})"
    )
    bins = Table("look-ups by reuse", "share", f"dlrm_datasets {published.year}", box=None, header_style="bold")
    for k, (share, like) in enumerate(zip(shares, published.reuse_shares, strict=True)):
        bins.add_row(f"up to {2**k:,}" if k < 16 else "more", f"{share:.3f}", f"{like:.3f}")
    console.print(bins)
    if out is not None:
        console.print(f"written to {out}", highlight=False)
