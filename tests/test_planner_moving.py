"""Plans for a job that runs: whatever moves is worth what moving it costs."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_autoshard.plan import Constraints, ShardingPlan, Topology
from dlrm_autoshard.planner.moves.proposals import _away_from_hosts
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.search.greedy import heuristic
from dlrm_autoshard.planner.search.local_search import optima
from dlrm_autoshard.planner.search.moving import Moving, held_bytes
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.tables import TableConfig, TableStats
from tests.planning_problems import BATCH, some_tables

PLANNER = Planner()


def some_task(seed: int, tables: int = 14, ranks: int = 3) -> PlacementTask:
    configs, stats = some_tables(tables, seed=seed)
    return PlacementTask.build(configs, stats, Topology(ranks), batch_size=BATCH)


@given(seed=st.integers(0, 20), price=st.floats(0.0, 1e-6), kicks=st.integers(0, 6))
def test_what_moves_is_worth_what_it_costs(seed: int, price: float, kicks: int) -> None:
    task = some_task(seed)
    costs = PLANNER.costs.costs_of(task)
    live_U = heuristic(task, "random", np.random.default_rng(seed))
    moving = Moving.of(task, task.plan_from(live_U), price)
    found_U, *_ = optima(task, costs, live_U, kicks=kicks, moving=moving)

    def total(rank_U: np.ndarray) -> float:
        return costs.step_ms(rank_U) + moving.total_ms(rank_U)

    assert total(found_U) <= total(live_U) * (1 + 1e-5)
    for unit in np.flatnonzero(found_U != live_U):
        sent_home_U = found_U.copy()
        sent_home_U[unit] = live_U[unit]
        assert total(sent_home_U) >= total(found_U) * (1 - 1e-4)


def test_nothing_moves_where_that_costs_more_than_perfect_balance_saves() -> None:
    task = some_task(3)
    costs = PLANNER.costs.costs_of(task)
    live_U = heuristic(task, "random", np.random.default_rng(0))
    costly = Moving.of(task, task.plan_from(live_U), costs.step_ms(live_U) / min(task.table_bytes.values()))
    assert (optima(task, costs, live_U, kicks=5, moving=costly)[0] == live_U).all()
    free, *_ = optima(task, costs, live_U, kicks=5, moving=Moving.of(task, task.plan_from(live_U), 0.0))
    assert costs.step_ms(free) < 0.9 * costs.step_ms(live_U)


@pytest.mark.parametrize("seed", range(3))
def test_a_costlier_move_carries_fewer_bytes(seed: int) -> None:
    task = some_task(seed, tables=40, ranks=4)
    live = task.plan_from(heuristic(task, "random", np.random.default_rng(seed)))
    carried = []
    for price in (0.0, 1e-7, 1e-6, 1e-5):
        (best, _), *_ = PLANNER.propose(task, live, ms_per_byte=price)
        carried.append(sum(task.table_bytes[move.shard] for move in live.moves_to(best)))
    assert carried[0] > 2 * carried[-1] and carried == sorted(carried, reverse=True)


def test_a_half_is_at_home_where_its_table_is_and_a_whole_where_most_of_it_is() -> None:
    table = TableConfig("a", 1000, 64)
    task = PlacementTask.build([table], [TableStats(1.0, batch_size=64)], Topology(3), batch_size=64)
    split = task.split_as(ShardingPlan({"a[0:16]": 0, "a[16:64]": 2}, 3))
    whole, parts = ShardingPlan({"a": 1}, 3), ShardingPlan({"a[0:16]": 0, "a[16:64]": 2}, 3)
    for price in (1.0, 0.0):
        assert Moving.of(split, whole, price).home_U.tolist() == [1, 1]
    assert held_bytes(split, whole).sum(axis=0) == pytest.approx(
        [0.0, table.weight_bytes, 0.0], rel=0.05
    )  # and its state
    merged = Moving.of(task, parts, 1.0)
    assert merged.home_U.tolist() == [2]
    assert merged.ms(np.array([0]), 2) == pytest.approx([0.25 * table.weight_bytes], rel=0.1)  # a quarter comes


def test_hosts_are_not_left_in_turn_once_the_time_is_over() -> None:
    """Each takes a placement of all tables anew, while training stands still."""
    configs, stats = some_tables(12, seed=1)
    topology = Topology(4, hosts=(0, 0, 1, 1))
    task = PlacementTask.build(configs, stats, topology, batch_size=BATCH)
    assert len(_away_from_hosts(PLANNER.costs, task, None)) == 2
    assert _away_from_hosts(PLANNER.costs, task, time.perf_counter()) == []


def test_a_plan_that_is_no_longer_allowed_is_left() -> None:
    configs, stats = some_tables(12, seed=1)
    live = ShardingPlan({table.name: 0 for table in configs}, 3)
    task = PlacementTask.build(
        configs,
        stats,
        Topology(3),
        batch_size=BATCH,
        constraints=Constraints(apart=((configs[0].name, configs[1].name),)),
    )
    assert not task.allows(live)
    for plan, _ in PLANNER.propose(task, live):
        task.check(plan)
