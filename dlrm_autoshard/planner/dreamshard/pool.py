"""Pools of tables to plan for: from a file, or synthetic with the statistics of a published data set.

pool = synthetic_pool(856, seed=0, batch_size=65536)
pool.tables[3], pool.stats[3]
pool.save(Path("tables.json"))
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.json_file import read_json
from dlrm_autoshard.plan import Constraints, Topology
from dlrm_autoshard.planner.dreamshard.published import PUBLISHED, Published
from dlrm_autoshard.planner.task import PlacementTask, Splits
from dlrm_autoshard.tables import NUM_REUSE_BINS, StatsRecord, TableConfig, TableRecord, TableStats

POOL_SCHEMA = 1


class PoolTable(TableRecord):
    """An entry of tables.json: a table with its statistics."""

    stats: StatsRecord


class PoolRecord(TypedDict):
    """The file tables.json."""

    schema: Literal[1]
    made_up: NotRequired[str]
    tables: Annotated[list[PoolTable], Field(min_length=1)]


@dataclass(frozen=True)
class TablePool:
    """Tables and their statistics, index by index. made_up: for synthetic tables, what they imitate."""

    tables: tuple[TableConfig, ...]
    stats: tuple[TableStats, ...]
    made_up: str = ""

    def __len__(self) -> int:
        return len(self.tables)

    def chosen(self, indices: Iterable[int]) -> TablePool:
        picked = list(indices)
        return TablePool(tuple(self.tables[i] for i in picked), tuple(self.stats[i] for i in picked), self.made_up)

    def task(
        self,
        topology: Topology,
        batch_size: int | None = None,
        constraints: Constraints = Constraints(),
        splits: Splits = Splits(),
    ) -> PlacementTask:
        """Returns a task that places all tables. batch_size: global; default that of the statistics."""
        return PlacementTask.build(
            self.tables,
            self.stats,
            topology,
            batch_size=batch_size or self.stats[0].batch_size,
            constraints=constraints,
            splits=splits,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": POOL_SCHEMA,
            **({"made_up": self.made_up} if self.made_up else {}),
            "tables": [
                {**table.to_json(), "stats": stat.to_json()}
                for table, stat in zip(self.tables, self.stats, strict=True)
            ],
        }

    @staticmethod
    def from_json(record: PoolRecord) -> TablePool:
        """Makes a pool from a checked record."""
        names = Counter(row["name"] for row in record["tables"])
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise UserError(f"there are two tables named '{twice}'; a plan needs to tell them apart.")
        rows = [dict(row) for row in record["tables"]]
        stats = tuple(TableStats.from_json(row.pop("stats")) for row in rows)
        return TablePool(tuple(TableConfig.from_json(row) for row in rows), stats, record.get("made_up", ""))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> TablePool:
        """Reads a pool; UserError names the file, the table and what is wrong."""
        record = read_json(path, PoolRecord, "table file")
        try:
            return TablePool.from_json(record)
        except UserError as error:
            raise UserError(f"table file '{path}': {error}") from error


def synthetic_pool(
    num_tables: int,
    seed: int,
    batch_size: int,
    rows: tuple[float, float] = (1e3, 1e7),
    dims: tuple[int, int] = (16, 128),
    pooling: tuple[float, float] = (1.0, 60.0),
    like: Published = PUBLISHED[2021],
) -> TablePool:
    """Tables with log-spaced rows, dims in multiples of 4, skewed pooling (log-spaced; from 0 on, 1 + pooling is) and
    Zipf reuse of mixed skew.

    Statistics are the expected ones at `batch_size`; the same seed gives the same tables at every batch size.

    Follows `dlrm_datasets`: with the default rows and pooling, over the whole pool, about the published mean pooling,
    mean reuse and share of look-ups per reuse bin (`dlrm-autoshard tables --synthetic 856` prints them).
    """
    generator = np.random.default_rng(seed)
    tables, stats = [], []
    for index in range(num_tables):
        num_rows = max(int(rows[0]), int(10 ** generator.uniform(*np.log10(rows))))  # 10 ** log10(1000) is below 1000
        dim = 4 * int(generator.integers(dims[0] // 4, dims[1] // 4 + 1))
        if pooling[0] > 0:
            mean_pooling = float(np.clip(np.exp(generator.uniform(*np.log(pooling))), *pooling))
        else:
            mean_pooling = float(np.clip(np.expm1(generator.uniform(*np.log1p(pooling))), *pooling))
        skew, head = float(generator.uniform(*like.skew)), float(10 ** generator.uniform(*like.log_head))
        tables.append(TableConfig(f"t_{index}", num_rows, dim))
        stats.append(zipf_stats(num_rows, mean_pooling, skew, head, batch_size))
    return TablePool(tuple(tables), tuple(stats), f"ids skewed like those of dlrm_datasets {like.year}")


def zipf_stats(num_rows: int, mean_pooling: float, skew: float, head: float, batch_size: int) -> TableStats:
    """Returns expected statistics of a batch whose ids have p(i-th hottest row) ~ (i + head)^-skew (Zipf-Mandelbrot).

    A row's uses in the batch are Poisson; rows are taken in groups of about equal heat, so this is quick for 1e7 rows.
    """
    edges = np.unique(np.floor(np.geomspace(1, num_rows + 1, 600)).astype(np.int64))
    size = np.diff(edges).astype(np.float64)
    heat = ((edges[:-1] + edges[1:] - 1) / 2 + head) ** -skew
    num_ids = mean_pooling * batch_size
    expected_uses = num_ids * heat / (size @ heat)
    # P(uses <= 2^k) for the bins' upper ends; P(uses = 0) in front, and 1 behind for the endless last bin.
    upper = torch.tensor([0.0, *(2.0**k for k in range(NUM_REUSE_BINS - 1))], dtype=torch.float64)
    at_most = torch.special.gammaincc(upper[None, :] + 1, torch.from_numpy(expected_uses)[:, None]).numpy()
    rows_per_bin = size @ np.diff(np.concatenate([at_most, np.ones((len(size), 1))], axis=1), axis=1)
    num_unique = max(rows_per_bin.sum(), 1e-9)
    return TableStats(
        mean_pooling=mean_pooling,
        reuse_histogram=tuple(float(share) for share in rows_per_bin / num_unique),
        mean_reuse=float(max(1.0, num_ids / num_unique)),
        batch_size=batch_size,
    )


def reuse_shares(stats: Sequence[TableStats]) -> tuple[list[float], float]:
    """Returns the share of lookups per reuse bin (ids at the bin's geometric mean), and the pool's mean reuse."""
    ids = np.array([s.mean_pooling * s.batch_size for s in stats])
    unique = ids / np.array([s.mean_reuse for s in stats])
    middle = 2.0 ** (np.arange(NUM_REUSE_BINS) - 0.4)
    middle[0] = 1.0
    lookups = np.array([s.reuse_histogram for s in stats]) * middle
    lookups *= (ids / np.maximum(lookups.sum(1), 1e-12))[:, None]
    shares = lookups.sum(0) / max(lookups.sum(), 1e-12)
    return [float(share) for share in shares], float(ids.sum() / unique.sum()) if ids.any() else 1.0
