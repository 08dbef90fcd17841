"""What a simulated job decided survives checkpoints and restarts."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest

from dlrm_autoshard.plan import ShardingPlan, Splits
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from tests.simulated_training import Training
from tests.simulated_training import unhurried_searches as unhurried_searches  # in every test here


def test_state_survives_a_checkpoint() -> None:
    one, other = Training(1), Training(1)
    one.plan = other.plan = one.worst_heuristic()
    assert one.interval().action == "moved"
    state = json.loads(json.dumps({"resharding": one.controller.state_dict(), "planner": one.planner.state_dict()}))
    other.planner.load_state_dict(state["planner"])
    other.controller.load_state_dict(state["resharding"])
    other.plan = one.plan
    other.step = one.step
    other.cluster.noise = one.cluster.noise = 0.0
    assert replace(one.interval(), decide_seconds=0.0) == replace(other.interval(), decide_seconds=0.0)
    assert one.records[0] == other.records[0] and one.records[0]["measured_gain"] is not None


def test_a_state_that_was_taken_stays_as_it_was_while_the_job_goes_on() -> None:
    """Whoever holds it in memory may write it later."""
    job = Training(1)
    job.plan = job.worst_heuristic()
    job.run(3)
    state = {"resharding": job.controller.state_dict(), "planner": job.planner.state_dict()}
    then = json.dumps(state)
    job.run(3)
    assert json.dumps(state) == then


@pytest.mark.parametrize("checkpoint", range(5))
@pytest.mark.parametrize("lost", [1, 2])
def test_a_restart_leaves_one_line_a_decision_and_judges_each_move_once(checkpoint: int, lost: int) -> None:
    """Killed `lost` intervals after a checkpoint, wherever the move is then: decided on, made or judged."""
    whole, killed = Training(0), Training(0)
    for job in (whole, killed):
        job.plan = job.worst_heuristic()
    whole.run(5 + lost)
    killed.run(checkpoint)
    kept = killed.records
    saved = json.loads(json.dumps({"state": killed.controller.state_dict(), "planner": killed.planner.state_dict()}))
    plan, step, draws = killed.plan, killed.step, copy.deepcopy((killed.cluster, killed.noise))
    killed.run(lost)
    # The process is gone: what goes on is a new one, with the checkpoint and the run directory as they were left.
    killed.planner = Planner(seed=0)
    killed.planner.load_state_dict(saved["planner"])
    killed.controller = killed.make_controller()
    killed.controller.load_state_dict(saved["state"])
    assert killed.records == kept
    killed.plan, killed.step, (killed.cluster, killed.noise) = plan, step, draws
    killed.run(5 + lost - checkpoint)
    assert [r["step"] for r in killed.records] == [r["step"] for r in whole.records]
    assert [r["action"] for r in killed.records] == [r["action"] for r in whole.records]
    for one in killed.records[:-1]:
        assert (one["measured_gain"] is not None) == (one["action"] == "moved")


def test_a_plan_of_before_is_not_gone_back_to_where_it_may_not_be_split_so_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Resumed with `splits.max_parts: 1`, or without `per_part`, under which ranks would refuse it."""
    job = Training(0)
    whole = job.worst_heuristic()
    halved = job.task.with_shards([*job.tables[0].halves(4), *job.tables[1:]])  # type: ignore[misc]
    split = halved.plan_from(np.array([i % 2 for i in range(len(halved.units))]))
    asked = list[ShardingPlan]()
    saved = job.planner.saved

    def heard(task: PlacementTask, plan: ShardingPlan, plans: list[ShardingPlan]) -> np.ndarray:
        asked.extend(plans)
        return saved(task, plan, plans)

    monkeypatch.setattr(job.planner, "saved", heard)
    for splits in (Splits(), Splits(max_parts=4, min_dim=4)):
        job.splits, job.plan, job.controller.left = splits, whole, [split]
        job.controller.task = job.task
        asked.clear()
        job.interval()
        assert (split in asked) == (splits.max_parts > 1)


def test_a_checkpoint_of_other_ranks_keeps_what_was_written_and_nothing_that_was_learned() -> None:
    job = Training(0)
    job.plan = job.worst_heuristic()
    assert job.interval().action == "moved"
    state, made = json.loads(json.dumps(job.controller.state_dict())), job.records
    job.interval()
    assert job.records[0]["measured_gain"] is not None
    job.controller = job.make_controller()
    job.controller.load_state_dict(state, same_ranks=False)
    assert job.records == made and job.controller.state_dict()["last_move"] is None
