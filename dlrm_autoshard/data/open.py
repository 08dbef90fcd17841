"""Opens the data source that the config's `data:` and `tables:` sections describe.

    source = open_source(config.data, config.tables)
    source.tables, source.num_dense, source.num_samples("train")

A source determines its tables and their rows; `tables:` gives dims, pooling and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.config_data import CriteoData, CustomData, DataConfig, MovielensData, ParquetData, SyntheticData
from dlrm_autoshard.data.batch import SPLITS, DataSource, Split
from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.data.resolve_tables import TableRows, resolve_tables
from dlrm_autoshard.data.sequences import with_cuts
from dlrm_autoshard.data.sources.criteo.source import CriteoSource
from dlrm_autoshard.data.sources.custom import open_custom
from dlrm_autoshard.data.sources.dlrm_datasets import DlrmDatasetsSource
from dlrm_autoshard.data.sources.movielens import MovielensSource
from dlrm_autoshard.data.sources.parquet import ParquetSource
from dlrm_autoshard.data.sources.synthetic import SyntheticSource
from dlrm_autoshard.formats.words import count


def open_source(
    data: DataConfig, tables: TablesConfig, *, labelled: bool = True, splits: Sequence[Split] = SPLITS
) -> DataSource:
    """Opens the source that `data.source` names. DataError names the bad file, table or key.

    labelled: False for predictions: parquet files need no labels and are not shuffled. splits: those that will be read;
    files and days of others may be missing.
    """
    source: DataSource = with_cuts(_opened(data, tables, labelled, splits), tables.sequences)
    if "train" in splits and labelled and source.num_samples("train") == 0:
        raise DataError(f"data.source '{data.source}' has no samples in split 'train': there is nothing to train on.")
    return source


def settled(data: DataConfig, source: DataSource) -> DataConfig:
    """Completes the section by what the files determine; runs record it so, and resume by it."""
    if not (isinstance(data, ParquetData) and isinstance(source, ParquetSource)):
        return data
    tables = [table.model_copy(update={"hash": source.hashed[table.column]}) for table in data.tables]
    return data.model_copy(update={"tables": tables})


def found(source: DataSource) -> str:
    """Returns a line on the number of samples, and of files if any, of each split."""
    files = getattr(source, "num_files", {})
    said = []
    for split in SPLITS:
        if (samples := source.num_samples(split)) or files.get(split):
            said.append(f"{split} {count(samples, 'sample')}" + (f" in {count(files[split], 'file')}" if files else ""))
    return f"data: {', '.join(said)}"


def _opened(data: DataConfig, tables: TablesConfig, labelled: bool, splits: Sequence[Split]) -> DataSource:
    if isinstance(data, SyntheticData):
        rows = [TableRows(table.name, table.num_embeddings, table.embedding_dim) for table in data.tables]
        return SyntheticSource(data, resolve_tables(rows, tables))
    if isinstance(data, MovielensData):
        return MovielensSource(data, tables)
    if isinstance(data, CriteoData):
        return CriteoSource(data, tables, splits)
    if isinstance(data, ParquetData):
        return ParquetSource(data, tables, labelled=labelled, splits=splits)
    if isinstance(data, CustomData):
        return open_custom(data, tables)
    return DlrmDatasetsSource(data, tables)
