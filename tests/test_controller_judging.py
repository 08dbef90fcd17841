"""A move is judged by what came of it, on a simulated cluster: and undone where that is its fault."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dlrm_autoshard.autoshard.decision import Decision
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from tests.simulated_training import Training
from tests.simulated_training import unhurried_searches as unhurried_searches  # in every test here


class Liar(Planner):
    """Predicts that one plan, which puts everything on rank 0, costs next to nothing; until it has seen it."""

    lie: ShardingPlan

    def propose(self, *args: Any, **options: Any) -> list[tuple[ShardingPlan, float]]:
        return [(self.lie, 0.0)]

    def saved(self, task: PlacementTask, current: ShardingPlan, candidates: Sequence[ShardingPlan]) -> np.ndarray:
        saved_DP = super().saved(task, current, candidates)
        if not any(profile.plan == self.lie for profile in self.costs.replay.profiles):
            saved_DP[:, [number for number, plan in enumerate(candidates) if plan == self.lie]] = 1.0
        return saved_DP


def liar(job: Training) -> Liar:
    planner = Liar(seed=0)
    planner.load_state_dict(job.planner.state_dict())
    planner.lie = ShardingPlan({table.name: 0 for table in job.tables}, 2)
    return planner


def test_a_move_that_made_it_worse_is_taken_back_once_and_not_tried_again() -> None:
    job = Training(1)
    job.run(2)
    good = job.plan
    job.plan = ShardingPlan({t.name: int(i % 5 == 0) for i, t in enumerate(job.tables)}, 2)  # a bad one
    start = job.plan
    job.controller = job.make_controller(liar(job))
    job.log.forget_after(-1)
    actions = job.run(6)
    assert actions[:2] == ["moved", "rolled_back"]
    assert set(actions[2:]) == {"kept"} and job.plan == start != good
    moved, back = job.records[:2]
    assert moved["action"] == "moved" and moved["measured_gain"] < 0 < moved["predicted_gain"]
    assert moved["paid_back_after_steps"] is None
    assert "measured -" in moved["text"] and ", but predicted " in moved["text"]
    assert back["action"] == "rolled_back" and back["text"].startswith("moved back ")
    assert back["predicted_gain"] == pytest.approx(back["measured_gain"], abs=0.1), "a move like any other"


def one_table_away(job: Training, times: float) -> ShardingPlan:
    """Under which a step takes about so many times as long as under the live plan."""
    now_ms, rank_of = job.true_ms(job.plan), job.plan.rank_of
    plans = [ShardingPlan({**rank_of, name: 1 - rank}, 2) for name, rank in rank_of.items()]
    return min(plans, key=lambda plan: abs(job.true_ms(plan) / now_ms - times))


def test_what_a_move_was_worth_is_no_matter_of_throughput() -> None:
    """A machine that was slow before the move, or is since, in what no stage explains: neither praised nor blamed."""
    for before, after in [(1.0, 1.5), (1.5, 1.0)]:
        job = Training(0)
        job.plan = one_table_away(job, 1.12)
        old_ms = job.true_ms(job.plan)
        assert job.interval(slower=before).action == "moved"
        assert job.interval(slower=after).action == "kept"
        true = (old_ms - job.true_ms(job.plan)) / (old_ms + (after - 1) * job.true_ms(job.plan))
        [moved] = [record for record in job.records if record["action"] == "moved"]
        assert moved["measured_low"] < true < moved["measured_high"] and moved["doubt"] is None
        assert moved["measured_gain"] == pytest.approx(true, abs=0.03)


def test_a_move_that_was_worth_nothing_is_said_not_to_be_what_was_predicted() -> None:
    job = Training(1)
    job.plan = one_table_away(job, 1.15)
    planner = liar(job)
    planner.lie = one_table_away(job, 1.0)
    job.controller = job.make_controller(planner)
    assert job.interval(slower=1.5).action == "moved"
    assert job.interval().action != "rolled_back", "its steps are a third faster, and none of that is the plan's"
    moved = job.records[0]
    assert abs(moved["measured_gain"]) < 0.04 and ", but predicted " in moved["doubt"]
    assert "what it gained is not known: measured " in moved["text"] and moved["paid_back_after_steps"] is None


def test_a_table_whose_parts_are_taken_back_counts_once() -> None:
    whole, split = (
        ShardingPlan({"a": 0, "b": 1}, 4),
        ShardingPlan({f"a[{4 * i}:{4 * i + 4}]": i for i in range(4)} | {"b": 1}, 4),
    )
    moves = tuple(move.record(16) for move in split.moves_to(whole))
    back = Decision(1, 1, "rolled_back", predicted_gain=0.1, moves=moves)
    assert len(moves) == 3 and back.text.startswith("moved back 1 table, 48 bytes")


def test_nothing_moves_to_a_plan_that_is_forbidden_by_now() -> None:
    """A job that is resumed may ask for other pins or ranks than the one that planned the move."""
    job = Training(1)
    good = job.plan
    job.plan = ShardingPlan({t.name: int(i % 5 == 0) for i, t in enumerate(job.tables)}, 2)
    job.controller = job.make_controller(liar(job))
    assert job.interval().action == "moved"
    job.topology = replace(job.topology, excluded=frozenset({1}))
    state = job.controller.state_dict()
    job.controller = job.make_controller(liar(job))
    job.controller.load_state_dict(state)
    job.controller.left.append(good)
    assert "rolled_back" not in job.run(3) and not job.plan.shards_on(1)


def test_rollback_can_be_switched_off() -> None:
    job = Training(1)
    job.plan = ShardingPlan({t.name: int(i % 5 == 0) for i, t in enumerate(job.tables)}, 2)
    job.controller = job.make_controller(liar(job), rollback=False)
    assert "rolled_back" not in job.run(3)


def test_a_move_just_before_all_ranks_became_slow_is_not_blamed_for_it() -> None:
    job = Training(0)
    job.plan = job.worst_heuristic()
    assert job.interval().action == "moved"
    job.cluster.slowdown = {0: 3.0, 1: 3.0}
    assert job.interval().action != "rolled_back"
    moved = next(record for record in job.records if record["action"] == "moved")
    assert moved["measured_gain"] > 0, "by what the old plan would cost now"


def test_a_move_just_before_a_rank_became_slow_is_not_blamed_for_it() -> None:
    job = Training(0)
    job.plan = job.worst_heuristic()
    assert job.interval().action == "moved"
    job.cluster.slowdown = {1: 2.0}
    assert job.interval().action == "moved"  # on, to relieve that rank
    assert job.records[0]["doubt"] or job.records[0]["measured_gain"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_what_is_told_of_a_move_made_on_a_change_s_first_slow_steps_is_what_it_saves_later(seed: int) -> None:
    """They are slow for caches and memory that the new data find cold: the old plan's steps would have settled, too."""
    job = Training(seed)
    job.run(3)
    job.stats = [
        replace(s, mean_pooling=s.mean_pooling * (1 + 2 * job.plan.rank_of[t.name]))
        for t, s in zip(job.tables, job.stats, strict=True)
    ]
    old, job.cluster.slowdown = job.plan, {0: 1.25, 1: 1.25}
    moved = job.interval(early=True)
    assert moved.action == "moved"
    job.cluster.slowdown = {}
    true = 1 - job.true_ms(job.plan) / job.true_ms(old)
    job.interval()
    told = next(record for record in job.records if record["step"] == moved.step)
    assert told["doubt"] is None and told["measured_low"] <= true <= told["measured_high"]
    assert told["measured_gain"] == pytest.approx(true, abs=0.03)


def test_a_move_with_which_a_rank_became_slow_is_not_judged_by_that() -> None:
    """What the old plan would cost on such ranks is compared, though the next move follows at once."""
    job = Training(0)
    job.plan = job.worst_heuristic()
    assert job.interval().action == "moved"
    job.cluster.slowdown = {1: 2.0}
    assert job.interval(early=True).action == "moved"
    assert job.records[0]["doubt"] or job.records[0]["measured_gain"] > 0


@pytest.mark.parametrize("early", [False, True])
def test_what_comes_with_a_move_where_ranks_are_as_they_were_is_its_own_doing(early: bool) -> None:
    """Also where it was so far from what was expected that the interval ended before its time."""
    job = Training(1)
    start = job.plan = ShardingPlan({t.name: int(i % 5 == 0) for i, t in enumerate(job.tables)}, 2)
    job.controller = job.make_controller(liar(job))
    assert job.interval().action == "moved"
    if early:
        job.interval(early=True)
    job.interval()
    assert job.plan == start
    assert job.records[0]["measured_gain"] < 0 < job.records[0]["predicted_gain"]


def test_records_tell_the_whole_story_in_order() -> None:
    job = Training(0)
    job.plan = job.worst_heuristic()
    job.run(4)
    assert [record["epoch"] for record in job.records] == [1, 2, 3, 4]
    moved = next(record for record in job.records if record["action"] == "moved")
    assert moved["text"].startswith("moved ") and "predicted gain " in moved["text"] and ", measured " in moved["text"]
    assert moved["measured_gain"] == pytest.approx(moved["predicted_gain"], abs=0.1)
    assert moved["bytes_moved"] > 0 and moved["paid_back_after_steps"] > 0
    for record in job.records:
        assert record["error_after"] <= max(record["error_before"], 0.03) + 0.02
        json.dumps(record)


def test_a_move_is_not_judged_by_a_plan_that_came_after_it() -> None:
    """A job that is resumed with other pins may place its tables anew."""
    job = Training(1)
    job.plan = ShardingPlan({t.name: int(i % 5 == 0) for i, t in enumerate(job.tables)}, 2)
    assert job.interval().action == "moved"
    state = json.loads(json.dumps(job.controller.state_dict()))
    job.controller = job.make_controller()
    job.controller.load_state_dict(state)
    job.plan = ShardingPlan({table.name: 0 for table in job.tables}, 2)
    assert job.interval().action != "rolled_back"
    assert job.records[0]["action"] == "moved" and job.records[0]["measured_gain"] is None
