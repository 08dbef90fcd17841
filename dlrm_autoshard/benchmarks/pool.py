"""Seeded pools of synthetic tables for planner benchmarks and tests: mixed dims, rows, pooling and reuse.

    tables, stats = table_pool(50, seed=0, batch_size=4096)

Reuse follows a Zipf law over the table's rows: the expected number of rows used k times in a batch is computed, not
drawn, so a pool of thousands is instant.
"""

from __future__ import annotations

import numpy as np

from dlrm_autoshard.tables import NUM_REUSE_BINS, TableConfig, TableStats, reuse_bins


def table_pool(
    count: int, seed: int, batch_size: int, dims: tuple[int, ...] = (16, 32, 64, 128), dtype: str = "fp32"
) -> tuple[list[TableConfig], list[TableStats]]:
    generator = np.random.default_rng([seed, count])
    tables, stats = [], []
    for i in range(count):
        rows = int(10 ** generator.uniform(2.5, 6.5))
        pooling = float(np.clip(np.exp(generator.normal(1.8, 1.2)), 0.3, 60))
        tables.append(
            TableConfig(f"t{i}", rows, int(generator.choice(dims)), dtype="fp16" if dtype == "fp16" else "fp32")
        )
        stats.append(zipf_stats(rows, pooling, float(generator.uniform(0.6, 1.3)), batch_size))
    return tables, stats


def zipf_stats(rows: int, mean_pooling: float, alpha: float, batch_size: int) -> TableStats:
    """Expected statistics of a batch whose ids are drawn from p(i) ~ i^-alpha."""
    # Rows in geometric groups: rows of a group have about the same chance.
    edges = np.unique(np.concatenate([np.arange(1, 65), np.geomspace(64, rows + 1, 200).astype(np.int64), [rows + 1]]))
    edges = edges[edges <= rows + 1]
    middle, size = np.sqrt(edges[:-1] * (edges[1:] - 1.0)), np.diff(edges)
    chance = middle**-alpha
    ids = mean_pooling * batch_size
    expected = ids * chance / (chance * size).sum()
    used = size * -np.expm1(-expected)
    histogram = np.bincount(reuse_bins(np.maximum(expected, 1)), weights=used, minlength=NUM_REUSE_BINS)
    return TableStats(
        mean_pooling=mean_pooling,
        reuse_histogram=tuple(float(f) for f in histogram / used.sum()),
        mean_reuse=float(max(ids / used.sum(), 1.0)),
        batch_size=batch_size,
    )
