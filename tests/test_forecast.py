"""The benchmark of forecasts: what it says of simulated ranks, whose tables' costs nobody knows beforehand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from dlrm_autoshard.benchmarks.forecast import INTERVALS, JOBS, Wander, forecasts, run, summarise
from dlrm_autoshard.benchmarks.harness import BenchError
from dlrm_autoshard.benchmarks.recorded_cluster import RecordedCluster
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import start_costs

NAME = "26 tables"


def simulated_row() -> dict[str, Any]:
    """Returns what `measured` does, of arithmetic ranks that share no table's hidden factor with the planner."""
    pool, draw = synthetic_pool(12, seed=3, batch_size=2048), np.random.default_rng(0)
    cluster = RecordedCluster(pool.tables, seed=0, noise=0.01)
    plan, profiles = ShardingPlan({table.name: i % 2 for i, table in enumerate(pool.tables)}, 2), []
    for _ in range(INTERVALS):
        profiles.append(replace(cluster.profile(pool.stats, plan, 2048), source="measured").to_json())
        plan = JOBS[NAME].wandered(plan, [table.name for table in pool.tables], draw)
    planner, task = Planner(), PlacementTask.build(pool.tables, pool.stats, Topology(2), batch_size=2048)
    start_costs(planner, task, fingerprint={}, measure_shards=partial(cluster.measure_shards, pool.stats, 2048))
    return {"of": [NAME, INTERVALS], "planner": planner.state_dict(), "profiles": profiles}


def test_terms_that_are_needed_are_missed_and_no_others() -> None:
    """Any of those of tables and sets takes the others' place, if worse."""
    row = simulated_row()
    assert len(forecasts(row, JOBS[NAME])) == INTERVALS - 1
    figures = summarise([row], ["table+fused+together+load", "width"])["figures"]
    assert figures["gains off by, %"] < 4 and figures["z"] < 2
    assert figures["without table+fused+together+load"] > 1 and figures["without width"] == 0


def test_gains_across_a_change_of_data_or_ranks_are_not_judged() -> None:
    """Nor are those of a plan that stayed."""
    row = simulated_row()
    judged = [np.isfinite(forecasts(row, job)[:, 1]) for job in (Wander(1), Wander(1, changes=(5,), busy=(8, 9)))]
    assert [int(of_all.sum()) for of_all in judged] == [INTERVALS - 1, INTERVALS - 4]
    row["profiles"][2:4] = [row["profiles"][2]] * 2
    assert not np.isfinite(forecasts(row, Wander(1))[2, 1])


def test_plans_wander_over_whole_tables_and_parts() -> None:
    draw, tables = np.random.default_rng(0), [f"t{i}" for i in range(10)]
    plan, seen = ShardingPlan(dict.fromkeys(tables, 0), 2), set[str]()
    for _ in range(10):
        plan = Wander(1, split=True).wandered(plan, tables, draw)
        assert set(plan.tables) == set(tables)
        seen |= set(plan.rank_of)
    assert set(tables) <= seen and {"t0[0:32]", "t0[32:64]"} <= seen


def test_an_unknown_term_is_a_sentence() -> None:
    with pytest.raises(BenchError, match="there is no term 'tabel'"):
        run(quick=True, without=["fused+tabel"])
