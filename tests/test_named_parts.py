"""Constraints that name parts of tables: where these are cut, what is planned and proposed so, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dlrm_autoshard import Constraints, PlanError, Planner, ShardingPlan, TableConfig, TableStats, Topology
from dlrm_autoshard.planner.moves.partial_move import first_part
from dlrm_autoshard.planner.moves.proposals import merged
from dlrm_autoshard.planner.task import PlacementTask, Splits
from dlrm_autoshard.probe.calibration import calibration_shards

BATCH = 2048
TABLES = [TableConfig("item", 50_000, 128), TableConfig("user", 9_000, 64), TableConfig("tag", 500, 32)]
STATS = [TableStats(20.0, batch_size=BATCH), TableStats(3.0, batch_size=BATCH), TableStats(1.0, batch_size=BATCH)]
HALVES = "item[0:64]", "item[64:128]"
WHOLE = ShardingPlan({"item": 0, "user": 1, "tag": 1}, 2)


def task_of(ranks: int = 2, splits: Splits = Splits(4, 16), **asked: Any) -> PlacementTask:
    return PlacementTask.build(
        TABLES, STATS, Topology(ranks), batch_size=BATCH, splits=splits, constraints=Constraints(**asked)
    )


def test_two_halves_pinned_to_two_ranks_lie_there_in_every_candidate() -> None:
    result = Planner().plan(task_of(pinned={HALVES[0]: 1, HALVES[1]: 0}))
    for candidate in result.candidates:
        assert [candidate.plan.rank_of[half] for half in HALVES] == [1, 0]


def test_only_the_part_that_is_pinned_is_the_rest_may_be_halved() -> None:
    plan = Planner().plan(task_of(4, pinned={"item[0:16]": 3})).plan
    parts = [str(part) for part in plan.parts_of("item")]
    assert parts[0] == "item[0:16]" and plan.rank_of["item[0:16]"] == 3
    assert 2 < len(parts) <= 4 and len(plan.ranks_of("item")) > 2
    on_one = task_of(1, pinned={"item[0:64]": 0})
    assert Planner().plan(on_one).plan.rank_of.keys() >= set(HALVES)  # side by side, and still a shard of its own


def test_parts_are_kept_apart_and_together() -> None:
    apart = Planner().plan(task_of(apart=(HALVES,))).plan
    assert len(apart.ranks_of("item")) == 2
    together = Planner().plan(task_of(together=(("item[64:96]", "user[0:32]"),), apart=(("item[64:96]", "tag"),))).plan
    assert together.rank_of["item[64:96]"] == together.rank_of["user[0:32]"] != together.rank_of["tag"]


def test_parts_that_overlap_are_cut_at_all_their_bounds() -> None:
    plan = Planner().plan(task_of(pinned={"item[0:64]": 1}, together=(("item[32:96]", "user"),))).plan
    assert plan.ranks_of("item[0:96]") == plan.ranks_of("user") == (1,)


@pytest.mark.parametrize(
    ("asked", "splits", "said"),
    [
        ({"pinned": {"item[500:600]": 0}}, Splits(4), r"^pinned names 'item\[500:600\]'.*has columns 0 to 128"),
        ({"apart": (("item[0:6]", "user"),)}, Splits(4), r"^apart names 'item\[0:6\]'.*multiples of 4"),
        ({"together": (("user", "item[64:0]"),)}, Splits(4), r"^together names 'item\[64:0\]'.*not a part of it"),
        (
            {"pinned": {"item[0:64]": 0}},
            Splits(4, allowed=False),
            r"'item\[0:64\]'.*one sum of squares per row.*tables\.optimizer\.per_part: true",
        ),
        ({"pinned": {"item[4:8]": 0}}, Splits(2), r"into 3 parts.*autoshard\.splits\.max_parts is 2"),
        ({"pinned": {"item": 0, "item[0:64]": 1}}, Splits(4), "columns in common"),
        ({"apart": (("item[0:64]", "item[32:96]"),)}, Splits(4), "columns in common"),
    ],
)
def test_what_cannot_be_is_refused_when_the_task_is_made(asked: dict[str, Any], splits: Splits, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        task_of(splits=splits, **asked)


def test_all_columns_of_a_table_are_no_part_of_it() -> None:
    task = task_of(splits=Splits(), pinned={"item[0:128]": 1})
    assert Planner().plan(task).plan.rank_of["item"] == 1


@pytest.mark.parametrize(
    "asked",
    [
        {"pinned": {HALVES[0]: 0, HALVES[1]: 1}},
        {"apart": (HALVES,)},
        {"together": ((HALVES[0], "user"),), "apart": ((HALVES[1], "user"),)},
    ],
)
def test_a_live_plan_with_the_table_whole_is_not_allowed_and_a_legal_one_is_proposed(asked: dict[str, Any]) -> None:
    task, planner = task_of(**asked), Planner()
    assert not task.allows(WHOLE)
    proposed = planner.propose(task, WHOLE)
    assert proposed and all(task.allows(plan) and "item" in plan.split_tables for plan, _ in proposed)


def test_a_live_plan_that_is_whole_and_legal_is_improved_by_moving_what_is_free() -> None:
    task = task_of(pinned={HALVES[0]: 0})
    assert task.allows(WHOLE)
    proposed = [plan for plan, _ in Planner().propose(task, WHOLE)]
    assert WHOLE in proposed and any("item" in plan.split_tables for plan in proposed)


def test_parts_are_merged_up_to_those_that_are_named() -> None:
    planner, task = Planner(), task_of(pinned={HALVES[0]: 0, HALVES[1]: 1})
    live = ShardingPlan({HALVES[0]: 0, HALVES[1]: 1, "user": 1, "tag": 0}, 2)
    now = task.split_as(live)
    assert merged(now, planner.costs.costs_of, now.ranks_from(live)) == []
    assert len(planner.propose(task, live)) > 0
    task = task_of(3, pinned={HALVES[0]: 0})
    live = ShardingPlan({HALVES[0]: 0, "item[64:96]": 1, "item[96:128]": 2, "user": 1, "tag": 0}, 3)
    now = task.split_as(live)
    [one] = merged(now, planner.costs.costs_of, now.ranks_from(live))
    assert one.task.names == (*HALVES, "user", "tag")


def test_named_parts_are_among_what_a_start_measures_alone() -> None:
    alone, _ = calibration_shards(task_of(pinned={HALVES[0]: 0}), seed=0)
    assert [HALVES[0]] in alone and [HALVES[1]] in alone and ["item"] in alone


def test_tables_whose_parts_stay_together_move_together() -> None:
    asked = Constraints(together=((HALVES[0], "user"),))
    target = ShardingPlan({"item[0:64]": 1, "item[64:128]": 0, "user": 1, "tag": 1}, 2)
    plan = ShardingPlan({"item": 0, "user": 0, "tag": 1}, 2)
    sizes = {"item": 10, "user": 5, "tag": 1}
    assert first_part(plan, target, sizes, 20, lambda _: 1.0, lambda _: True, asked) == target
    assert isinstance(first_part(plan, target, sizes, 10, lambda _: 1.0, lambda _: True, asked), str)
