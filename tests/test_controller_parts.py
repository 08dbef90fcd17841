"""Moves in parts, and tables that are split while a simulated job runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

import pytest

from dlrm_autoshard.autoshard.decide import MoveCost
from dlrm_autoshard.planner.task import Splits
from dlrm_autoshard.tables import TableConfig, TableStats
from tests.simulated_training import BATCH, Training
from tests.simulated_training import unhurried_searches as unhurried_searches  # in every test here


def test_a_move_larger_than_the_limit_goes_in_parts_none_of_them_slower() -> None:
    limit, most_parts, in_parts, of_best = 0.02, 0, list[bool](), list[float]()
    for seed in range(5):
        job = Training(seed)
        job.plan = job.worst_heuristic()
        job.controller = job.make_controller(max_move_gib_per_step=limit)
        costs, parts = [job.true_ms(job.plan)], []
        for _ in range(6):
            decision = job.interval()
            costs.append(job.true_ms(job.plan))
            if decision.action == "moved":
                assert 0 < decision.bytes_moved <= limit * 2**30
                parts.append(decision)
        in_parts += ["; a part of" in part.text for part in parts]
        assert all(after <= before * 1.03 for before, after in itertools.pairwise(costs))
        most_parts = max(most_parts, len(parts))
        of_best.append(costs[-1] / job.best_known_ms())
    assert most_parts >= 2 and sum(in_parts) > len(in_parts) / 2
    assert fmean(of_best) <= 1.03 and max(of_best) <= 1.08, "it moves what helps, and tables above the limit stay"


def test_where_no_part_of_a_move_is_small_enough_it_says_so() -> None:
    job = Training(0)
    job.plan = job.worst_heuristic()
    job.controller = job.make_controller(max_move_gib_per_step=1e-5)
    job.controller.move_cost = MoveCost(fixed_seconds=1e-6)
    decision = job.interval()
    assert decision.action == "kept"
    assert "at most 10.5 KiB may move at a time, and the smallest of what moves, 't" in decision.text


def _with_a_table_that_becomes_dominant() -> Training:
    """After two intervals, on four ranks."""
    job = Training(2, world_size=4, splits=Splits(max_parts=4, min_dim=16))
    job.tables[0] = TableConfig("t0", 200_000, 128)
    job.bytes_of["t0"] = job.tables[0].weight_bytes
    job.plan, job.controller = job.start_plan(), job.make_controller()
    job.run(2)
    assert not job.plan.split_tables
    lookups = sum(t.embedding_dim * s.mean_pooling for t, s in zip(job.tables[1:], job.stats[1:], strict=True))
    job.stats[0] = TableStats(lookups / 128, batch_size=BATCH)
    return job


def test_a_table_that_becomes_dominant_is_split_live_within_two_decisions() -> None:
    job = _with_a_table_that_becomes_dominant()
    whole_ms = job.true_ms(job.plan)
    job.run(2)
    assert "t0" in job.plan.split_tables
    assert job.best_known_split_ms(job.tables[0]) / job.true_ms(job.plan) >= 0.95
    assert job.true_ms(job.plan) < 0.8 * whole_ms


def test_it_is_split_though_a_search_has_no_time_to_come_to_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No whole plan balances it, which needs no search to be seen."""
    job = _with_a_table_that_becomes_dominant()
    monkeypatch.setattr(job.planner, "propose", partial(_in_short, job.planner.propose))
    assert job.interval().action == "moved" and "t0" in job.plan.split_tables


def _in_short(propose: Callable[..., Any], *args: Any, **_: Any) -> Any:
    return propose(*args, budget_seconds=0.2)
