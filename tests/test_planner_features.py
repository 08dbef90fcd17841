"""What the networks see of a table depends on the table and the batch, on nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlrm_autoshard import TableConfig, TableStats
from dlrm_autoshard.plan import Topology
from dlrm_autoshard.planner.baselines.reference import scaled_by_task
from dlrm_autoshard.planner.costs.features import (
    NUM_NETWORK,
    NUM_RAW,
    WORK,
    distinct_rows,
    network_features,
    raw_features,
    work,
)
from dlrm_autoshard.planner.dreamshard.pool import zipf_stats
from dlrm_autoshard.planner.task import PlacementTask
from tests.planning_problems import BATCH, some_tables


def test_a_tables_features_do_not_change_with_its_companions() -> None:
    tables, stats = some_tables(12)
    together = network_features(tables, stats, BATCH)
    for i in range(12):
        alone = network_features([tables[i]], [stats[i]], BATCH)
        np.testing.assert_array_equal(alone[0], together[i])
        np.testing.assert_array_equal(work([tables[i]], [stats[i]], BATCH)[0], work(tables, stats, BATCH)[i])
    assert together.shape == (12, NUM_NETWORK)


def test_the_raw_21_are_dim_rows_pooling_size_and_the_histogram() -> None:
    table, stats = TableConfig("t", 1000, 16, dtype="fp16"), TableStats(0.7, batch_size=512)
    features = raw_features([table], [stats])
    assert features.shape == (1, NUM_RAW) == (1, 21)
    np.testing.assert_array_equal(features[0, :4], [16, 1000, 0.7, 1000 * 16 * 2])
    np.testing.assert_array_equal(features[0, 4:], stats.reuse_histogram)


def test_equal_tables_have_no_spread_and_still_give_numbers() -> None:
    tables = [TableConfig(f"t{i}", 100, 16) for i in range(3)]
    stats = [TableStats(1.0, batch_size=BATCH)] * 3
    assert np.isfinite(network_features(tables, stats, BATCH)).all()
    task = PlacementTask.build(tables, stats, Topology(2), batch_size=BATCH)
    assert np.isfinite(scaled_by_task(task)).all()


@given(
    rows=st.integers(1, 10**9),
    dim=st.integers(1, 256).map(lambda d: 4 * d),
    pooling=st.floats(0, 500),
    batch=st.integers(1, 10**6),
)
def test_features_are_finite_for_any_table(rows: int, dim: int, pooling: float, batch: int) -> None:
    table, stats = TableConfig("t", rows, dim), TableStats(pooling, batch_size=64)
    features = network_features([table], [stats], batch)
    done = work([table], [stats], batch)
    assert np.isfinite(features).all() and np.abs(features).max() < 20
    assert np.isfinite(done).all() and (done >= 0).all()
    assert done[0, WORK.index("distinct_rows")] <= done[0, WORK.index("ids")] + 1e-9


def test_distinct_rows_grow_as_a_larger_batch_of_the_same_data_has_them() -> None:
    for skew in (0.7, 1.0, 1.2):
        small, large = (zipf_stats(100_000, 5.0, skew, 10.0, batch) for batch in (2048, 4096))
        raw = raw_features([TableConfig("t", 100_000, 16)], [small])
        estimate = distinct_rows(raw, np.array([small.mean_reuse]), np.array([2048.0]), 4096)[0]
        true = 5.0 * 4096 / large.mean_reuse
        assert abs(estimate / true - 1) < 0.05
