"""What sampled steps tell of tables' statistics, at no cost to the steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_autoshard.autoshard import table_observer
from dlrm_autoshard.autoshard.table_observer import TableObserver
from dlrm_autoshard.distributed.lookup.id_distribution import LocalIds
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig, measure_table_stats


def test_reuse_is_of_the_first_steps_ids_as_they_were_and_is_not_reckoned_within_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step's ids lie in memory that may be used anew; reuse costs a sort, by which a short interval looks slower."""
    tables = [TableConfig("a", 100, 8), TableConfig("b[0:8]", 100, 8)]
    owner: Any = SimpleNamespace(local_shards=tables, plan=ShardingPlan({"a": 0, "b[0:8]": 0, "b[8:16]": 1}, 2))
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
    assert found["a"].mean_pooling == found["b"].mean_pooling == 2.0
    assert (found["a"].mean_reuse, found["b"].mean_reuse) == (4.0, 1.0)
    assert observer.summary() == {}
