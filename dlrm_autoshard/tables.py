"""Embedding tables as plain data: shapes, shards, and the statistics that decide their cost.

user = TableConfig("user", num_embeddings=943, embedding_dim=32)
user.part(16, 32)                                        # TableConfig("user[16:32]", 943, 16): a column-wise shard
stats = measure_table_stats(lengths_TB, values_N)        # one TableStats per table
stats[0].mean_pooling, stats[0].reuse_histogram          # 1.0, (0.1, 0.2, ...)
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PositiveFloat, model_validator
from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.json_file import checked
from dlrm_autoshard.formats.local_path import LocalPath
from dlrm_autoshard.formats.numbers import BatchSize, Name
from dlrm_autoshard.formats.section import Section
from dlrm_autoshard.optimizers import OPTIMIZERS, TableOptimizerConfig
from dlrm_autoshard.optimizers import TableOptimizer as TableOptimizer

# Axis suffixes used in the whole package: T tables, B samples of one rank's batch, N ids of one batch, W ranks, F dense
# features, D embedding dim.

Pooling = Literal["sum", "mean"]
TableDtype = Literal["fp32", "fp16"]

NUM_REUSE_BINS = 17
"""Bins (0,1], (1,2], (2,4], ... (16384,32768], (32768,inf) of DreamShard's locality feature (section 3.1)."""

_DTYPE_BYTES: dict[str, int] = {"fp32": 4, "fp16": 2}


class StatsRecord(TypedDict):
    """`TableStats` as JSON."""

    mean_pooling: Annotated[float, Field(ge=0, le=1e9)]
    reuse_histogram: Annotated[
        list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=NUM_REUSE_BINS, max_length=NUM_REUSE_BINS)
    ]
    mean_reuse: NotRequired[Annotated[float, Field(ge=1, le=1e12)]]
    batch_size: NotRequired[BatchSize]
    features: NotRequired[Annotated[int, Field(ge=1, le=10**6)] | Annotated[float, Field(ge=0, le=10**6)]]
    row_sixteenths: NotRequired[
        Annotated[list[Annotated[int, Field(ge=0, le=2**48)]], Field(min_length=15, max_length=15)]
    ]


class TableRecord(TypedDict):
    """`TableConfig` as JSON."""

    name: Name
    num_embeddings: Annotated[int, Field(gt=0, le=2**40)]
    embedding_dim: Annotated[int, Field(gt=0, le=2**16)]
    pooling: NotRequired[Pooling]
    dtype: NotRequired[TableDtype]
    optimizer: NotRequired[TableOptimizerConfig]


Range = tuple[int, int]
"""[start, stop) of a table's rows or columns."""


class Shard(str):
    """The name of a table or of a part of it: `item`, `item[0:64]` (columns), `item[rows 0:1000]`, or
    `item[rows 0:1000, 0:64]`. Ranges are [start, stop); None: all.

    A shard is a string, for plan keys, JSON and messages. Names from files and users become shards on entry; the rest
    of the package uses shards.
    """

    table: str
    columns: Range | None
    rows: Range | None

    def __new__(cls, name: str) -> Shard:
        return name if isinstance(name, Shard) else _parsed(name)

    @staticmethod
    def of(table: str, columns: Range | None = None, rows: Range | None = None) -> Shard:
        ranges = [] if rows is None else ["rows {}:{}".format(*rows)]
        ranges += [] if columns is None else ["{}:{}".format(*columns)]
        return Shard(f"{table}[{', '.join(ranges)}]" if ranges else table)

    def __reduce__(self) -> tuple[type[Shard], tuple[str]]:
        return Shard, (str(self),)

    @property
    def is_whole(self) -> bool:
        return self.columns is None and self.rows is None

    @property
    def all_columns(self) -> Shard:
        """The same rows, with all columns of the table."""
        return Shard.of(self.table, rows=self.rows)

    def __and__(self, other: Shard) -> Shard | None:
        """Returns the overlap of both shards, if any; `within` gives its place in each."""
        if self.table != other.table:
            return None
        columns, rows = _common(self.columns, other.columns), _common(self.rows, other.rows)
        if any(both is not None and both[0] >= both[1] for both in (columns, rows)):
            return None
        return Shard.of(self.table, columns, rows)

    def within(self, other: Shard) -> tuple[slice, slice]:
        """Returns the slices of rows and columns of this shard inside `other`, which contains it."""
        return _among(self.rows, other.rows), _among(self.columns, other.columns)


_PART = re.compile(r"(.*?)\[(?!\])(?:rows (\d{1,15}):(\d{1,15}))?(?:(?:(?<=\[)|, )(\d{1,9}):(\d{1,9}))?\]", re.DOTALL)


@lru_cache(maxsize=2**16)
def _parsed(name: str) -> Shard:
    shard = str.__new__(Shard, name)
    found = _PART.fullmatch(name) if name.endswith("]") else None
    shard.table, shard.rows, shard.columns = name, None, None
    if found is not None:
        shard.table = found[1]
        shard.rows, shard.columns = (
            None if found[first] is None else (int(found[first]), int(found[first + 1])) for first in (2, 4)
        )
    return shard


def _common(one: Range | None, other: Range | None) -> Range | None:
    if one is None or other is None:
        return one or other
    return max(one[0], other[0]), min(one[1], other[1])


def _among(inner: Range | None, outer: Range | None) -> slice:
    if inner is None or inner == outer:
        return slice(None)
    first = 0 if outer is None else outer[0]
    return slice(inner[0] - first, inner[1] - first)


class TableInit(Section):
    """Initial values of a table, instead of uniform in +-1/sqrt(rows). One key is given."""

    file: LocalPath | None = None  # .npy: [rows, dim]; .parquet: a column of lists, or `dim` columns of numbers
    uniform: PositiveFloat | None = None  # in +- this
    normal: PositiveFloat | None = None  # the standard deviation, around 0

    @model_validator(mode="after")
    def _one(self) -> TableInit:
        given = self.model_dump(exclude_none=True)
        if len(given) != 1:
            said = " and ".join(given) or "nothing"
            raise ValueError(f"a table's init has {said}; give it one of file, uniform and normal")
        return self


@dataclass(frozen=True)
class TableConfig:
    """An embedding table, or a part of one, named as `Shard` says. `embedding_dim` is a multiple of 4, which fbgemm's
    kernels need. optimizer: None: that of the other tables. init: None: uniform initial values."""

    name: str
    num_embeddings: int
    embedding_dim: int
    pooling: Pooling = "sum"
    dtype: TableDtype = "fp32"
    optimizer: TableOptimizerConfig | None = None
    init: TableInit | None = field(default=None, compare=False)  # not used in plans or records

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise UserError(f"a table is named {self.name!r}; a name needs printable characters")
        if not 1 <= self.num_embeddings <= 2**48:
            raise UserError(f"table '{self.name}' has {self.num_embeddings} rows; it needs 1 to 2^48")
        if self.embedding_dim < 4 or self.embedding_dim % 4:
            raise UserError(
                f"table '{self.name}' has embedding_dim {self.embedding_dim}; fbgemm needs a multiple of 4 "
                f"(try {max(4, -(-self.embedding_dim // 4) * 4)})"
            )
        for what, (start, stop), key in (
            ("columns", self.columns, "embedding_dim"),
            ("rows", self.rows, "num_embeddings"),
        ):
            if stop - start != getattr(self, key):
                name = f"[{'rows ' * (what == 'rows')}{start}:{stop}]"
                raise UserError(
                    f"table '{self.name}' is named as {what} {start} to {stop} of a table, but has {key} "
                    f"{getattr(self, key)}. Give it a name without {name}."
                )

    @property
    def shard(self) -> Shard:
        """The table's name as a shard."""
        return Shard(self.name)

    @property
    def columns(self) -> tuple[int, int]:
        """[start, stop) of the whole table's columns."""
        return self.shard.columns or (0, self.embedding_dim)

    @property
    def rows(self) -> tuple[int, int]:
        """[start, stop) of the whole table's rows."""
        return self.shard.rows or (0, self.num_embeddings)

    def part(self, start: int, stop: int) -> TableConfig:
        """Returns columns [start, stop) of the whole table, which must be among this part's."""
        first, last = self.columns
        if not first <= start < stop <= last or start % 4 or stop % 4:
            raise UserError(
                f"table '{self.name}' has columns {first} to {last}: [{start}:{stop}] is not a part of it. "
                "Parts must start and stop at multiples of 4."
            )
        if (start, stop) == (first, last):
            return self
        name = Shard.of(self.shard.table, (start, stop), self.shard.rows)
        return replace(self, name=name, embedding_dim=stop - start)

    def row_range(self, start: int, stop: int) -> TableConfig:
        """Returns rows [start, stop) of the whole table, which must be among this part's."""
        first, last = self.rows
        if not first <= start < stop <= last:
            raise UserError(
                f"table '{self.name}' has rows {first} to {last}: [rows {start}:{stop}] is not a part of it."
            )
        if (start, stop) == (first, last):
            return self
        name = Shard.of(self.shard.table, self.shard.columns, (start, stop))
        return replace(self, name=name, num_embeddings=stop - start)

    def holding(self, shard: Shard) -> TableConfig:
        """Returns the part of this table that `shard` names; the table itself for a whole one."""
        part = self if shard.columns is None else self.part(*shard.columns)
        return part if shard.rows is None else part.row_range(*shard.rows)

    def joined(self, one: TableConfig, other: TableConfig) -> TableConfig | None:
        """Returns two parts of this table as one if `other` follows `one`; else None."""
        if one.shard.table == other.shard.table:
            if one.rows == other.rows and one.columns[1] == other.columns[0]:
                return self.row_range(*one.rows).part(one.columns[0], other.columns[1])
            if one.columns == other.columns and one.rows[1] == other.rows[0]:
                return self.row_range(one.rows[0], other.rows[1]).part(*one.columns)
        return None

    def even_columns(self, parts: int, min_dim: int) -> tuple[TableConfig, ...] | None:
        """Returns parts with about equally many columns; None if one would have fewer than `min_dim`. If wide enough,
        they start at multiples of 16, because an exchange in eight bits scales 16 columns together."""
        start, block = self.columns[0], 16 if self.embedding_dim >= 16 * parts else 4
        edges = [start + block * (self.embedding_dim * number // (block * parts)) for number in range(parts)]
        widths = [stop - first for first, stop in itertools.pairwise([*edges, self.columns[1]])]
        if min(widths) < max(4, min_dim):
            return None
        return tuple(self.part(*columns) for columns in itertools.pairwise([*edges, self.columns[1]]))

    def even_rows(self, parts: int, stats: TableStats) -> tuple[TableConfig, ...] | None:
        """Returns row ranges of a whole table with about equal work; None if a single row has too much."""
        edges = stats.rows_at([number / parts for number in range(parts + 1)], self.num_embeddings)
        if any(first >= last for first, last in itertools.pairwise(edges)):
            return None
        return tuple(self.row_range(*rows) for rows in itertools.pairwise(edges))

    def halves_by_rows(self) -> tuple[TableConfig, TableConfig] | None:
        """Returns both halves by rows; None if there is a single row."""
        start, stop = self.rows
        middle = (start + stop + 1) // 2
        return (self.row_range(start, middle), self.row_range(middle, stop)) if middle < stop else None

    def halves(self, min_dim: int) -> tuple[TableConfig, TableConfig] | None:
        """Returns both halves by columns, the wider first; None if one would have fewer than `min_dim`."""
        start, stop = self.columns
        middle = start + 4 * -(-self.embedding_dim // 8)
        if min(middle - start, stop - middle) < max(4, min_dim):
            return None
        return self.part(start, middle), self.part(middle, stop)

    @property
    def weight_bytes(self) -> int:
        return self.num_embeddings * self.embedding_dim * _DTYPE_BYTES[self.dtype]

    def state_shapes(self, optimizer: TableOptimizer) -> dict[str, tuple[int, ...]]:
        """Returns shapes of the optimizer's state by name. optimizer: of tables without their own."""
        name = optimizer if self.optimizer is None else self.optimizer.name
        return OPTIMIZERS[name].state_shapes(self.num_embeddings, self.embedding_dim)

    def may_split(self, others: bool) -> bool:
        """Whether a split by columns trains the same model. others: answer for tables without their own optimizer."""
        return others if self.optimizer is None else self.optimizer.splits_tables

    def optimizer_bytes(self, optimizer: TableOptimizer) -> int:
        """Returns bytes of that state, in fp32."""
        return 4 * sum(map(math.prod, self.state_shapes(optimizer).values()))

    def to_json(self) -> dict[str, Any]:
        own = {} if self.optimizer is None else {"optimizer": self.optimizer.model_dump()}
        return {key: value for key, value in vars(self).items() if key not in ("optimizer", "init")} | own

    @staticmethod
    def from_json(record: Any) -> TableConfig:
        return TableConfig(**checked(TableRecord, record))


def lookup_work(embedding_dim: int, mean_pooling: float) -> float:
    """Returns the floats read, and later updated, per sample: a table's weight where there is no cost model."""
    return embedding_dim * mean_pooling


def output_order(tables: Sequence[TableConfig]) -> list[int]:
    """Returns table indices sorted by dim (stable): the order in lookups and in the pooled output, whatever the
    plan."""
    return sorted(range(len(tables)), key=lambda i: tables[i].embedding_dim)


@dataclass(frozen=True)
class TableStats:
    """How the data use one table.

    mean_pooling: ids per sample, a real number (0.7 is not 0).
    reuse_histogram: of the *unique* ids in a batch, the fraction whose number of uses falls in each of the 17 bins;
    sums to 1, or is all zero if no id was seen.
    mean_reuse: ids / unique ids in that batch (1.0 if no id was seen).
    batch_size: samples in the measured batch; reuse grows with it.
    features: vectors sent per sample: one per feature that looks up the table, one per id of a sequence. Below 1 if
        each distinct id's vector travels once. The other figures are over all these features' ids.
    row_sixteenths: rows below which 1/16, 2/16, ... 15/16 of the table's work lie, half of it lookups, half distinct
        rows; empty: all rows are used alike.
    """

    mean_pooling: float
    reuse_histogram: tuple[float, ...] = (1.0,) + (0.0,) * (NUM_REUSE_BINS - 1)
    mean_reuse: float = 1.0
    batch_size: int = 1
    features: float = 1
    row_sixteenths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.row_sixteenths) not in (0, 15):
            raise UserError(f"row_sixteenths has {len(self.row_sixteenths)} entries; it needs 15, or none")
        if len(self.reuse_histogram) != NUM_REUSE_BINS:
            raise UserError(f"reuse_histogram has {len(self.reuse_histogram)} bins; it needs {NUM_REUSE_BINS}")

    def to_json(self) -> dict[str, Any]:
        record = asdict(self) | {"reuse_histogram": list(self.reuse_histogram)}
        sixteenths = record.pop("row_sixteenths")
        return record | ({"row_sixteenths": [*sixteenths]} if sixteenths else {})

    def work_below(self, row: int, num_rows: int) -> float:
        """Returns the share of a table's work in the rows below `row`."""
        return float(np.interp(row, *self._rows_and_work(num_rows)))

    def rows_at(self, shares: Sequence[float], num_rows: int) -> list[int]:
        """Returns the rows below which these shares of a table's work lie."""
        rows, work = self._rows_and_work(num_rows)
        return [round(row) for row in np.interp(shares, work, rows)]

    def _rows_and_work(self, num_rows: int) -> tuple[list[int], list[float]]:
        if not self.row_sixteenths:
            return [0, num_rows], [0.0, 1.0]
        return [0, *self.row_sixteenths, num_rows], [number / 16 for number in range(17)]

    @staticmethod
    def from_json(record: Any) -> TableStats:
        stats: dict[str, Any] = {**checked(StatsRecord, record)}
        for key in {"reuse_histogram", "row_sixteenths"} & stats.keys():
            stats[key] = tuple(stats[key])
        return TableStats(**stats)


def stats_of_part(part: TableConfig, whole: TableConfig, stats: TableStats) -> TableStats:
    """Returns the statistics of a table's part: the table's, with mean_pooling times the share of work in the part's
    rows. `row_sixteenths` stay the table's."""
    return _scaled(stats, _share_of_work(part, whole, stats))


def part_of(shard: Shard, wholes: Mapping[str, tuple[TableConfig, TableStats]]) -> tuple[TableConfig, TableStats]:
    """Returns a shard as a table of its own, with its statistics. wholes: tables and statistics by name."""
    table, stats = wholes[shard.table]
    part = table.holding(shard)
    return part, stats_of_part(part, table, stats)


def _scaled(stats: TableStats, share: float) -> TableStats:
    """Scales the ids. A row range still sends a vector for each sample, zeros without ids, unless ids travel once."""
    features = stats.features * share if stats.features < 1 else stats.features
    return stats if share == 1 else replace(stats, mean_pooling=stats.mean_pooling * share, features=features)


def _share_of_work(part: TableConfig, whole: TableConfig, stats: TableStats) -> float:
    if part.num_embeddings == whole.num_embeddings:
        return 1.0
    before, until = (stats.work_below(row, whole.num_embeddings) for row in part.rows)
    return max(1e-6, until - before)


def side_by_side(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns those ranges, from the first row on, in which each starts where the one before ends. Others belong to
    parts of other columns, which may be cut at other rows."""
    chosen: list[tuple[int, int]] = []
    for rows in sorted(ranges):
        if not chosen or rows[0] == chosen[-1][1]:
            chosen.append(rows)
    return chosen


def stats_of_whole(part: TableConfig, whole: TableConfig, stats: TableStats) -> TableStats:
    """Returns the table's statistics from a part's: the inverse of `stats_of_part`."""
    return _scaled(stats, 1 / _share_of_work(part, whole, stats))


def reuse_bins(counts: np.ndarray) -> np.ndarray:
    """Returns the bin of each use count (>= 1): 0 for (0,1], 1 for (1,2], 2 for (2,4], ... 16 for (32768,inf)."""
    return np.minimum(np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64), NUM_REUSE_BINS - 1)


def measure_table_stats(lengths_TB: np.ndarray, values_N: np.ndarray) -> list[TableStats]:
    """Returns statistics of each table from one batch in table-major layout (all of table 0's ids first).

    lengths_TB: [T, B] ids per table and sample; values_N: [N] ids, N = lengths_TB.sum().
    """
    num_tables, batch_size = lengths_TB.shape
    ends_T = np.cumsum(lengths_TB.sum(axis=1))
    stats = []
    for table in range(num_tables):
        ids = values_N[ends_T[table - 1] if table else 0 : ends_T[table]]
        if len(ids) == 0:
            stats.append(TableStats(0.0, (0.0,) * NUM_REUSE_BINS, 1.0, batch_size))
            continue
        uses, sixteenths = _uses(ids)
        distinct, often = int(uses.sum()), np.flatnonzero(uses)
        histogram = np.bincount(reuse_bins(often), weights=uses[often], minlength=NUM_REUSE_BINS) / distinct
        shares = tuple(float(f) for f in histogram)
        reuse = len(ids) / distinct
        stats.append(TableStats(len(ids) / batch_size, shares, reuse, batch_size, row_sixteenths=sixteenths))
    return stats


def _uses(ids: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Returns how many distinct ids occur n times, for n up to the most [most + 1], and `TableStats.row_sixteenths`.
    Training waits for this, so few rows are counted instead of sorted."""
    top = int(ids.max())
    if top < 4 * len(ids):
        counts = np.bincount(ids)
        rows = np.flatnonzero(counts)
        counts = counts[rows]
    else:
        import torch  # the command line starts without it

        narrow = torch.from_numpy(ids.astype(np.int32) if top < 2**31 else ids)
        ordered = torch.sort(narrow).values.numpy()  # a radix sort, two to four times as fast as numpy's
        ends = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), len(ordered) - 1)
        rows, counts = ordered[ends], np.diff(ends, prepend=-1)
    work = np.cumsum(counts) / len(ids) + np.arange(1, len(rows) + 1) / len(rows)
    at = np.searchsorted(work, np.arange(1, 16) / 8)
    return np.bincount(counts), tuple(int(row) + 1 for row in rows[at])


def memory_bytes(
    tables: Sequence[TableConfig],
    stats: Sequence[TableStats],
    optimizer: TableOptimizer,
    global_batch_size: int,
) -> dict[str, int]:
    """Returns bytes of each table on its owner: weights, optimizer state and its share of exchange buffers.

    Buffers hold the global batch: pooled vectors and their gradients (fp32, also for empty bags), ids and their sorted
    copy (8 bytes each).
    """
    needed = {}
    for table, stat in zip(tables, stats, strict=True):
        vectors = int(2 * 4 * table.embedding_dim * max(1, stat.features) * global_batch_size)
        ids = 2 * 8 * int(np.ceil(stat.mean_pooling * global_batch_size))
        needed[table.name] = table.weight_bytes + table.optimizer_bytes(optimizer) + vectors + ids
    return needed
