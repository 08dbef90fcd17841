"""Moves in parts, and tables that are split while a simulated job runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dlrm_autoshard.autoshard.payoff import MoveCost
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import Splits
from dlrm_autoshard.probe.shard_probe import ShardTime
from dlrm_autoshard.tables import TableConfig, TableStats
from tests.simulated_training import BATCH, STEPS, Training
from tests.simulated_training import unhurried_searches as unhurried_searches  # in every test here


def test_a_move_larger_than_the_limit_goes_in_parts_none_of_them_slower() -> None:
    limit, most_parts, in_parts, of_best = 0.02, 0, list[bool](), list[float]()
    for seed in range(3):
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
    assert max(of_best) <= 1.08, "of what it may move, it moves what helps: tables above the limit stay"


def test_where_no_part_of_a_move_is_small_enough_it_says_so() -> None:
    job = Training(0)
    job.plan = job.worst_heuristic()
    job.controller = job.make_controller(max_move_gib_per_step=1e-5)
    job.controller.chooser.move_cost = MoveCost(fixed_seconds=1e-6)
    decision = job.interval()
    assert decision.action == "kept"
    assert "at most 10.5 KiB may move at a time, and the smallest of what moves, 't" in decision.text


def test_a_move_in_parts_goes_on_after_a_checkpoint() -> None:
    one, other = Training(0), Training(0)
    one.plan = one.worst_heuristic()
    one.controller = one.make_controller(max_move_gib_per_step=0.02)
    assert one.interval().part_of is not None
    target = one.controller.state_dict()["chooser"]["target"]
    other.controller.load_state_dict(json.loads(json.dumps(one.controller.state_dict())))
    assert target is not None and other.controller.state_dict()["chooser"]["target"] == target


def test_a_move_in_parts_counts_once_unless_it_is_given_up() -> None:
    """Else the move after it would hide that tables have moved, and less would be asked of the next."""
    job = Training(0)
    chooser, other = job.controller.chooser, job.worst_heuristic()
    chooser.moved(job.plan, 1, 1.0, in_parts=True)
    chooser.moved(other, 1, 1.0, in_parts=False)
    assert len(chooser.history.moves_at) == 1, "its last part"
    chooser.target = other
    chooser.moved(job.plan, 1, 1.0, in_parts=True)
    chooser.give_up()
    chooser.moved(other, 1, 1.0, in_parts=False)
    assert len(chooser.history.moves_at) == 3 and chooser.target is None


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


@pytest.mark.parametrize("steps_left", [3, 100_000])
def test_half_of_a_table_that_becomes_dominant_is_measured_where_that_is_worth_its_time(steps_left: int) -> None:
    asked = list[list[str]]()

    def measure(shards: Sequence[Sequence[str]]) -> list[ShardTime]:
        asked.extend(map(list, shards))
        pairs = [job.task.shard(name) for [name] in shards]
        alone = [job.exact.profile([t], [s], ShardingPlan({t.name: 0}, 1), BATCH).ranks[0] for t, s in pairs]
        return [ShardTime(cost.fwd_compute_ms, cost.bwd_compute_ms, 0.01, 3) for cost in alone]

    job = _with_a_table_that_becomes_dominant()
    job.total, job.measure_shards = job.step + STEPS + steps_left, measure
    decision = job.interval()
    assert asked == ([] if steps_left == 3 else [["t0"]] * 4 + [["t0[0:64]"]] * 4)
    assert (decision.action == "moved" and "t0" in job.plan.split_tables) == (steps_left > 3)


def test_it_is_split_though_no_search_had_time_to_come_to_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its half had been measured, and "no candidate was faster": searches ended before they tried to split it."""

    def measure(shards: Sequence[Sequence[str]]) -> list[ShardTime]:
        pairs = [job.task.shard(name) for [name] in shards]
        alone = [job.exact.profile([t], [s], ShardingPlan({t.name: 0}, 1), BATCH).ranks[0] for t, s in pairs]
        return [ShardTime(cost.fwd_compute_ms, cost.bwd_compute_ms, 0.01, 3) for cost in alone]

    job = _with_a_table_that_becomes_dominant()
    job.measure_shards = measure
    monkeypatch.setattr(job.planner, "propose", lambda task, plan, *_, **__: [(plan, 0.0)])
    assert job.interval().action == "moved" and "t0" in job.plan.split_tables


def test_where_a_rank_has_no_memory_to_measure_that_is_tried_once_and_predictions_have_to_do() -> None:
    asked = list[Sequence[Sequence[str]]]()

    def measure(shards: Sequence[Sequence[str]]) -> list[ShardTime]:
        asked.append(shards)
        raise UserError("rank 1 could not measure its shard: no memory")

    job = _with_a_table_that_becomes_dominant()
    job.measure_shards = measure
    job.run(3)
    assert len(asked) == 1 and "t0" in job.plan.split_tables


class Hopeless(Planner):
    """Is not surer by what shards take."""

    def gain_once_measured(self, *args: Any) -> np.ndarray:
        told_D: np.ndarray = 0.0 * super().gain_once_measured(*args)
        return told_D


def test_nothing_is_measured_where_that_leaves_open_what_it_would_save() -> None:
    def measure(shards: Sequence[Sequence[str]]) -> list[ShardTime]:
        raise AssertionError("nothing was to be measured")

    job, planner = _with_a_table_that_becomes_dominant(), Hopeless(seed=0)
    planner.load_state_dict(job.planner.state_dict())
    job.controller, job.measure_shards = job.make_controller(planner), measure
    job.interval()
