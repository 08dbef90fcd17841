"""Draws ids that repeat as a table's statistics say, for micro-benchmarks to look up instead of the data's.

    lengths_B, ids_N = draw_ids(table, stats, batch_size=2048, draw=0)      # 2048 bags, pooling as in the data
    measure_table_stats(lengths_B[None], ids_N)                             # ~ stats

Equal arguments give equal ids. Draws 0, 1, 2, ... are successive batches: the same hot rows, other cold ones.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from dlrm_autoshard.data.hashing import mix64
from dlrm_autoshard.tables import NUM_REUSE_BINS, TableConfig, TableStats

_LOWEST_USES = np.array([1] + [2 ** (k - 1) + 1 for k in range(1, NUM_REUSE_BINS)], dtype=np.float64)
_HIGHEST_USES = np.array([2.0**k for k in range(NUM_REUSE_BINS)])  # the last bin is open: 2^16 is a guess
_FEISTEL_ROUNDS = 3


def draw_ids(table: TableConfig, stats: TableStats, batch_size: int, draw: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns bag lengths [B] and ids [N] of one table in the draw-th batch."""
    whole = table.shard.table  # column shards look up the same ids as their table
    generator = np.random.default_rng((zlib.crc32(whole.encode()), table.num_embeddings, draw))
    lengths_B = _bag_lengths(stats.mean_pooling, batch_size, generator)
    num_ids = int(lengths_B.sum())
    if num_ids == 0:
        return lengths_B, np.zeros(0, dtype=np.int64)
    # Reuse was measured over a batch of stats.batch_size: a larger batch is several of those, a smaller one a part.
    looked_at = max(1, round(stats.mean_pooling * stats.batch_size))
    parts = [
        _one_batch(table.num_embeddings, stats, looked_at, draw * 7919 + part, generator)
        for part in range(math.ceil(num_ids / looked_at))
    ]
    return lengths_B, np.concatenate(parts)[:num_ids]


def _bag_lengths(mean_pooling: float, batch_size: int, generator: np.random.Generator) -> np.ndarray:
    """Returns bags of floor or ceil of the mean, in random order; their total is right to one id."""
    total = round(mean_pooling * batch_size)
    lengths_B = np.full(batch_size, total // batch_size, dtype=np.int64)
    lengths_B[generator.permutation(batch_size)[: total % batch_size]] += 1
    return lengths_B


def _one_batch(num_rows: int, stats: TableStats, num_ids: int, part: int, generator: np.random.Generator) -> np.ndarray:
    uses_U = _uses_of_each_id(stats, num_ids, num_rows)
    rank_U = np.arange(len(uses_U))
    # Ids used once differ in every batch; ids that repeat within a batch are taken to repeat between batches.
    cold = uses_U == 1
    rank_U[cold] += part * int(cold.sum())
    ids_N = np.repeat(scattered(rank_U, num_rows), uses_U)
    generator.shuffle(ids_N)
    return ids_N


def _uses_of_each_id(stats: TableStats, num_ids: int, num_rows: int) -> np.ndarray:
    """Returns use counts of the distinct ids, hottest first: they sum to `num_ids` and follow the table's histogram."""
    num_unique = int(np.clip(round(num_ids / max(stats.mean_reuse, 1.0)), 1, min(num_ids, num_rows)))
    shares = np.asarray(stats.reuse_histogram)
    if shares.sum() == 0:
        shares = np.eye(NUM_REUSE_BINS)[0]
    edges = np.round(np.cumsum(shares / shares.sum()) * num_unique).astype(np.int64)
    size_of_bin = np.diff(edges, prepend=0)
    bin_U = np.repeat(np.arange(NUM_REUSE_BINS), size_of_bin)
    quantile_U = (np.arange(num_unique) - (edges - size_of_bin)[bin_U] + 0.5) / size_of_bin[bin_U]
    lowest_U, span_U = _LOWEST_USES[bin_U], (_HIGHEST_USES - _LOWEST_USES)[bin_U]
    # Within a bin, uses lie at lowest + span * quantile^p, whose mean is 1 / (p + 1); p follows from the total.
    wanted = num_ids - lowest_U.sum()
    fill = np.clip(wanted / max(span_U.sum(), 1.0), 0.02, 0.98)
    above_U = np.floor(span_U * quantile_U ** (1 / fill - 1))
    if above_U.sum() > wanted >= 0:  # bins with few ids have another mean; scaling down keeps each in its bin
        above_U = np.floor(above_U * (wanted / above_U.sum()))
    uses_U = -np.sort(-(lowest_U + above_U).astype(np.int64))
    if uses_U.sum() > num_ids:
        uses_U = 1 + ((uses_U - 1) * ((num_ids - num_unique) / (uses_U - 1).sum())).astype(np.int64)
    # The rest from rounding goes to the hottest hundredth, where it changes least.
    left, top = num_ids - int(uses_U.sum()), max(1, num_unique // 100)
    uses_U[:top] += left // top
    uses_U[0] += left % top
    return uses_U


def scattered(rank_U: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns the row of the i-th hottest id: a fixed one-to-one scatter, as real hot ids are not neighbours.

    Rows must be random: evenly spaced ones (i * 0.618 * num_rows, say) share fewer cache sets, and a table of 1e6 rows
    of 128 columns took 25 ms a step instead of the 35 of real ids.
    """
    half = np.uint64(max(1, ((num_rows - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)

    def mixed(place_U: np.ndarray) -> np.ndarray:
        """Applies a Feistel network, which is one to one whatever its rounds mix."""
        left_U, right_U = place_U >> half, place_U & low
        for number in range(_FEISTEL_ROUNDS):
            left_U, right_U = right_U, left_U ^ (mix64(right_U + np.uint64(number << 40)) & low)
        found_U: np.ndarray = left_U << half | right_U
        return found_U

    row_U = mixed((rank_U % num_rows).astype(np.uint64))
    while (outside_U := row_U >= num_rows).any():  # repeated until all are rows, which keeps it one to one
        row_U[outside_U] = mixed(row_U[outside_U])
    return row_U.astype(np.int64)
