"""The `data:` section of the YAML file: one class per source, chosen by `source:`."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dlrm_autoshard.formats.local_path import LocalPath
from dlrm_autoshard.formats.section import Section
from dlrm_autoshard.formats.sentences import show

EmbeddingDim = Annotated[int, Field(gt=0, le=2**16)]


class DataSection(Section):
    """Keys that every source has."""

    on_bad_id: Literal["error", "clip", "hash"] = (
        "error"  # ids outside their table: end the job, take the nearest, or hash
    )
    prefetch_batches: Annotated[int, Field(ge=0, le=1000)] = 2  # batches to read ahead
    reader_threads: Annotated[int, Field(ge=1, le=64)] | None = None  # per rank; null: 1 on CPU, up to 4 for a GPU


class SyntheticTable(Section):
    """A made-up table, and how its ids are drawn."""

    name: str
    num_embeddings: Annotated[int, Field(gt=0, le=2**40)]
    embedding_dim: EmbeddingDim | None = None  # default: tables.embedding_dim
    mean_pooling: Annotated[float, Field(ge=0, le=1e5)] = 1.0  # ids per sample
    lengths: Literal["uniform", "geometric"] = "uniform"  # geometric: many short bags, some empty, few long
    alpha: NonNegativeFloat = 1.05  # skew: p(i-th hottest row) ~ i^-alpha; 0 is uniform


class Drift(Section):
    """From `epoch` on, tables swap mean pooling (a seeded permutation) and/or have other hot rows."""

    epoch: PositiveInt  # the first epoch, from 0, with the changed data
    permute_pooling: bool = True  # tables swap their ids per sample
    move_hot_ids: bool = True  # other rows of each table become the frequent ones


class SyntheticData(DataSection):
    """Made-up samples."""

    source: Literal["synthetic"]
    tables: list[SyntheticTable] = Field(min_length=1)
    num_dense: Annotated[int, Field(ge=0, le=10**6)] = 13
    train_samples: PositiveInt = 65536
    val_samples: NonNegativeInt = 0
    test_samples: NonNegativeInt = 8192
    drift: list[Drift] = []
    reuse_batches: PositiveInt | None = None  # draw only so many batches and repeat them
    seed: int = 0


class MovielensData(DataSection):
    """MovieLens-100K."""

    source: Literal["movielens"]
    dir: LocalPath = "data/movielens-100k"
    split: Literal["random", "time"] = "random"  # time: test on the newest 10% of ratings (harder)
    history: Annotated[int, Field(ge=0, le=10**5)] = 0  # length of a feature: the items that the user rated before
    seed: int = 0


class CriteoData(DataSection):
    """Criteo's click logs, preprocessed by `dlrm-autoshard data criteo`."""

    source: Literal["criteo"]
    dir: LocalPath
    train_days: list[NonNegativeInt] | None = None  # default: all days but test_days; []: all of test_days is test
    test_days: list[NonNegativeInt] | None = None  # half val, half test; default: all but train_days, or the last day
    multi_hot: bool = False  # read day_*_sparse_multi_hot.npz
    num_embeddings: list[PositiveInt] | None = None  # rows of the 26 tables, ids modulo them; default: as in the data
    row_scale: Annotated[float, Field(gt=0, le=1)] = 1.0  # shrinks tables of over 1,000 rows; ids modulo the new rows


class DlrmDatasetsData(DataSection):
    """Files of Meta's dlrm_datasets."""

    source: Literal["dlrm_datasets"]
    files: list[LocalPath]
    tables: list[NonNegativeInt] | None = None  # default: all tables of the file
    num_embeddings: list[PositiveInt] | None = None  # rows of the chosen tables; default: largest id + 1, rounded up
    num_dense: NonNegativeInt = 13  # made-up dense features, as the traces have none
    seed: int = 0  # of the hidden model that makes labels


class ParquetTable(Section):
    """A column of ids, and the rows of its table."""

    column: str  # of whole numbers or text, or lists of them; also the table's name
    num_embeddings: Annotated[int, Field(gt=0, le=2**40)]
    # true: 7 and "7" get one row; false: whole numbers are rows. Default: by the first file's type, true for text.
    hash: bool | None = None
    weights: str | None = None  # a column of the same lengths, whose numbers multiply the ids' rows


class ParquetData(DataSection):
    """Parquet files."""

    source: Literal["parquet"]
    train: list[str] = Field(min_length=1)  # files, folders of them, or patterns such as day_*.parquet, **/*.parquet
    val: list[str] = []
    test: list[str] = []
    labels: dict[str, PositiveFloat] = Field(min_length=1)  # column -> weight of its task in the loss
    dense: list[str] = []
    tables: list[ParquetTable] = Field(min_length=1)
    sample_weight: str | None = None  # a column that multiplies a row's loss
    shuffle: bool = True  # train's row groups, and rows among so many of them:
    shuffle_row_groups: PositiveInt = 4
    seed: int = 0

    @pydantic.model_validator(mode="after")
    def _each_column_has_one_part(self) -> ParquetData:
        """Refuses a label that is also an input: it would be learned in a step, and is missing in predictions."""
        tables = [table.column for table in self.tables]
        weights = [table.weights for table in self.tables if table.weights is not None]
        weighs = [] if self.sample_weight is None else [self.sample_weight]
        for part, columns in (
            ("data.dense", self.dense),
            ("data.tables", tables),
            ("the weights of data.tables", weights),
            ("data.sample_weight", weighs),
        ):
            for column in columns:
                if column in self.labels:
                    raise ValueError(
                        f"column {show(column)} is in data.labels and in {part}: the model would see what it must "
                        "predict. Remove it from one"
                    )
        for part, columns in (("data.dense", self.dense), ("data.tables", tables)):
            for column, times in Counter(columns).items():
                if times > 1:
                    raise ValueError(f"column {show(column)} is in {part} {times} times. Name it once")
        for table in self.tables:
            if table.weights == table.column:
                raise ValueError(
                    f"column {show(table.column)} of data.tables is named as its own weights. Name another"
                )
        return self


class CustomData(DataSection):
    """Samples from your own Python class."""

    source: Literal["custom"]
    factory: str  # file.py:name or package.module:name, called as name(tables_config, **options); returns a DataSource
    options: dict[str, Any] = {}


DataConfig = Annotated[
    SyntheticData | MovielensData | CriteoData | DlrmDatasetsData | ParquetData | CustomData,
    Field(discriminator="source"),
]
