"""What sampled steps tell of tables' statistics, at no cost to the steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_autoshard.autoshard import table_observer
from dlrm_autoshard.autoshard.table_observer import TableObserver, of_whole_tables
from dlrm_autoshard.distributed.lookup.id_distribution import LocalIds
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import NUM_REUSE_BINS, Shard, TableConfig, TableStats, measure_table_stats, reuse_bins


def test_reuse_is_of_the_first_steps_ids_as_they_were_and_is_not_reckoned_within_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step's ids lie in memory that may be used anew; reuse costs a sort, by which a short interval looks slower."""
    tables = [TableConfig("a", 100, 8), TableConfig("b[0:8]", 100, 8)]
    owner: Any = SimpleNamespace(local_lookups=tables, plan=ShardingPlan({"a": 0, "b[0:8]": 0, "b[8:16]": 1}, 2))
    reckoned = []

    def measured(*given: Any) -> Any:
        reckoned.append(given)
        return measure_table_stats(*given)

    monkeypatch.setattr(table_observer, "measure_table_stats", measured)
    observer = TableObserver(owner)
    offsets = torch.tensor([0, 3, 4, 6, 8])  # of each table two bags, of a rank one
    ids = LocalIds(torch.tensor([7, 7, 7, 7, 1, 2, 3, 4]), offsets, batch_size=1)
    observer.observe(ids, 2)
    ids.values_N.fill_(0)
    observer.observe(ids, 2)
    assert reckoned == []
    found = observer.summary()
    assert len(reckoned) == 1 and set(found) == {"a", "b"}
    assert found[Shard("a")].mean_pooling == found[Shard("b")].mean_pooling == 2.0
    assert (found[Shard("a")].mean_reuse, found[Shard("b")].mean_reuse) == (4.0, 1.0)
    assert observer.summary() == {}


def test_observers_of_one_step_after_the_other_know_together_what_one_of_all_does() -> None:
    """Where a change was suspected in vain, the interval's steps are taken together again."""
    owner: Any = SimpleNamespace(local_lookups=[TableConfig("a", 100, 8)], plan=ShardingPlan({"a": 0}, 2))
    whole, first, later = (TableObserver(owner) for _ in range(3))
    steps = [LocalIds(torch.arange(n) // 2, torch.tensor([0, 1, n]), batch_size=1) for n in (8, 3, 5)]
    for step in steps:
        whole.observe(step, 2)
    for observer, step in zip((first, later, later), steps, strict=True):
        observer.observe(step, 2)
    empty = TableObserver(owner)
    empty.add(first)
    empty.add(later)
    empty.add(TableObserver(owner))
    assert empty.summary() == whole.summary() != {}


def test_what_was_observed_under_another_plan_is_forgotten() -> None:
    """Whoever has moved the tables: rows of another table are not this one's, nor does their number fit."""
    a, b = TableConfig("a", 100, 8), TableConfig("b", 100, 8)
    owner: Any = SimpleNamespace(local_lookups=[a], plan=ShardingPlan({"a": 0, "b": 1}, 2))
    observer = TableObserver(owner)
    observer.observe(LocalIds(torch.arange(8), torch.tensor([0, 4, 8]), batch_size=1), 2)
    owner.plan, owner.local_lookups = ShardingPlan({"a": 1, "b": 0}, 2), [b]
    assert observer.summary() == {}
    observer.observe(LocalIds(torch.arange(2), torch.tensor([0, 1, 2]), batch_size=1), 2)
    owner.plan, owner.local_lookups = ShardingPlan({"a": 0, "b": 0}, 2), [a, b]
    observer.observe(LocalIds(torch.arange(8), torch.tensor([0, 1, 2, 5, 8]), batch_size=1), 2)
    assert {name: found.mean_pooling for name, found in observer.summary().items()} == {"a": 1.0, "b": 3.0}


def test_a_tables_features_are_observed_as_one() -> None:
    """Of two features of `b[0:8]`, the second one's bags lie behind the first one's."""
    a, b = TableConfig("a", 100, 8), TableConfig("b[0:8]", 100, 8)
    owner: Any = SimpleNamespace(local_lookups=[a, b, b], plan=ShardingPlan({"a": 0, "b[0:8]": 0, "b[8:16]": 1}, 2))
    observer = TableObserver(owner)
    offsets = torch.tensor([0, 3, 4, 6, 8, 8, 12])
    observer.observe(LocalIds(torch.tensor([7, 7, 7, 7, 1, 2, 3, 4, 1, 2, 3, 4]), offsets, batch_size=1), 2)
    found = observer.summary()
    assert (found[Shard("b")].mean_pooling, found[Shard("b")].mean_reuse, found[Shard("b")].features) == (4.0, 2.0, 2)
    assert (found[Shard("a")].mean_pooling, found[Shard("a")].mean_reuse, found[Shard("a")].features) == (2.0, 4.0, 1)


def test_ranges_of_a_tables_rows_are_observed_as_one_table() -> None:
    first, second = TableStats(3.0, mean_reuse=2.0, batch_size=8), TableStats(1.0, mean_reuse=1.0, batch_size=8)
    low = Shard("b[rows 0:50]")
    by_rank = [{Shard("a"): first, low: first}, {Shard("b[rows 50:100]"): second, low: first}]
    found = of_whole_tables(by_rank)
    assert found["a"] == first and (found["b"].mean_pooling, found["b"].mean_reuse) == (4.0, 1.6)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60) | st.lists(st.integers(0, 2**40), min_size=1, max_size=60),
    st.integers(1, 3),
)
def test_reuse_is_how_often_each_id_comes_whether_there_are_few_rows_or_many(ids: list[int], again: int) -> None:
    values_N = np.array(ids * again)
    [found] = measure_table_stats(np.array([[len(values_N)]]), values_N)
    _, times = np.unique(values_N, return_counts=True)
    assert found.mean_reuse == pytest.approx(times.mean())
    shares = np.bincount(reuse_bins(times), minlength=NUM_REUSE_BINS) / len(times)
    assert found.reuse_histogram == pytest.approx(tuple(shares))
