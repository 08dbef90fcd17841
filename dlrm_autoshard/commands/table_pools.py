"""Reads tables and their statistics for the planning commands: of a run, a CSV file, TorchRec modules, files of ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_autoshard.commands.planning import OfRun
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.progress import tracked
from dlrm_autoshard.formats.words import some_of

if TYPE_CHECKING:
    from dlrm_autoshard.config import TablesConfig
    from dlrm_autoshard.config_data import SyntheticTable
    from dlrm_autoshard.data.batch import DataSource
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.torchrec.module_file import Modules

_MOST_BYTES = 1 << 24


def tables_of_run(run: Path) -> OfRun:
    """Returns a run's tables from its records alone, without reading its data or running code that its config names.

    Pooling is as last measured, reuse as at the job's start."""
    from dataclasses import replace

    from dlrm_autoshard.config import load_config
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.records.facts import pooling_of_tables
    from dlrm_autoshard.records.plans import TABLES
    from dlrm_autoshard.records.run import RunRecord
    from dlrm_autoshard.training.run_directory import CONFIG

    record = RunRecord.load(run)
    if not record.intervals:
        raise UserError(f"'{run}' has no profiled epoch (profile.enabled: false), so its tables' work is unknown.")
    if not (run / CONFIG).exists():
        raise UserError(
            f"'{run}' has no {CONFIG}: it comes from a custom training loop, whose settings are not recorded. List its "
            "tables in a file (`tables --from-csv FILE`)."
        )
    if not (run / TABLES).exists():
        raise UserError(
            f"'{run}' has no {TABLES}, the description of its tables; earlier versions did not write it. Resume the "
            "run, or list its tables in a file (`tables --from-csv FILE`)."
        )
    pool = TablePool.load(run / TABLES)
    pooling = pooling_of_tables(record.last.tables)
    stats = [
        replace(s, mean_pooling=pooling.get(t.name, s.mean_pooling))
        for t, s in zip(pool.tables, pool.stats, strict=True)
    ]
    last = record.last
    return OfRun(replace(pool, stats=tuple(stats)), load_config(run / CONFIG), last.hosts, last.batch_size)


def pool_of_csv(path: Path, shape: TablesConfig, batch_size: int, seed: int, quiet: bool) -> TablePool:
    """Reads a CSV file of tables, one per line, and draws ids by their pooling and skew. UserError names the bad
    line."""
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
    """Returns the tables of TorchRec modules, named by `table_key`; draws ids for those without statistics."""
    from dataclasses import replace

    from dlrm_autoshard.config import TablesConfig
    from dlrm_autoshard.config_data import SyntheticTable
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.tables import TableConfig, TableStats
    from dlrm_autoshard.torchrec.tables import table_key

    tables, known, guessed, features = [], {}, [], {}
    for path, rows in modules.items():
        for row in rows:
            key, dim = table_key(path, row["name"], modules), row["embedding_dim"]
            shape = (key, row["num_embeddings"], dim)
            tables.append(TableConfig(*shape, row.get("pooling", "sum"), row.get("dtype", "fp32")))
            features[key] = max(1, len(row.get("features", ())))
            if "stats" in row:
                known[key] = TableStats.from_json(row["stats"])
            else:
                drawn = dict(zip(("name", "num_embeddings", "embedding_dim"), shape, strict=True))
                guessed.append(SyntheticTable.model_validate({**drawn, "mean_pooling": row.get("mean_pooling", 1.0)}))
    if guessed:
        pool = _drawn(guessed, TablesConfig(), batch_size, seed, quiet)
        known |= {table.name: stats for table, stats in zip(pool.tables, pool.stats, strict=True)}
    return TablePool(tuple(tables), tuple(replace(known[t.name], features=features[t.name]) for t in tables))


def _drawn(tables: list[SyntheticTable], shape: TablesConfig, batch_size: int, seed: int, quiet: bool) -> TablePool:
    from dlrm_autoshard.config_data import SyntheticData
    from dlrm_autoshard.data.open import open_source

    data = SyntheticData(source="synthetic", tables=tables, train_samples=batch_size, seed=seed)
    return _measured(open_source(data, shape), batch_size, quiet)


def pool_of_files(files: list[str], shape: TablesConfig, batch_size: int | None, quiet: bool) -> TablePool:
    """Returns tables of dlrm_datasets files, with statistics over a whole batch including test samples, as a file is
    one batch of its job. Reads one table's ids at a time."""
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
    for table in tracked(range(len(source.tables)), len(source.tables), "measuring tables", quiet):
        lengths_TB, ids = source.bags(0, size, slice(table, table + 1))
        if (least := int(ids.min(initial=0))) < 0:
            raise UserError(
                f"table '{source.tables[table].name}' of {some_of(files)} has id {least}; ids are 0 or more."
            )
        stats += measure_table_stats(lengths_TB, ids)
    return TablePool(source.tables, tuple(stats))


def _measured(source: DataSource, batch_size: int, quiet: bool) -> TablePool:
    """Returns the tables with statistics over the first batch of the training samples."""
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.tables import measure_table_stats

    batch = source.read("train", 0, 0, min(batch_size, source.num_samples("train")))
    lengths_TB, values_N = batch.lengths_TB.numpy(), batch.values_N.numpy()
    ends, stats = lengths_TB.sum(1).cumsum(0).tolist(), []
    for number, _ in tracked(enumerate(source.tables), len(source.tables), "measuring tables", quiet):
        ids = values_N[ends[number - 1] if number else 0 : ends[number]]
        stats += measure_table_stats(lengths_TB[number : number + 1], ids)
    return TablePool(source.tables, tuple(stats))
