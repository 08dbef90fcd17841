"""Resharding in the trainer: decisions are recorded, moves change no bit, a checkpoint after one loads anywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_autoshard.autoshard.controller import Controller
from dlrm_autoshard.autoshard.decide import Horizon
from dlrm_autoshard.autoshard.decision import Decision, Interval
from dlrm_autoshard.config import Config
from dlrm_autoshard.distributed.moves import agree as reshard_agree
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.training.run_log import result_of
from tests.moving_job import MovingTrainer, settings
from tests.ranks import run_ranks
from tests.trainers import TABLES, config, losses, make_runtime, plan_file, records, tensors, trainer

Digests = dict[str, str]


def train_with_moves(rank: int, world_size: int, job: Config, run_dir: Path) -> Digests:
    runtime = make_runtime(rank, world_size)
    if rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
    runtime.barrier()
    made = MovingTrainer(job, runtime, run_dir, moves=True)
    made.run()
    return made.digests()


def load_and_go_on(rank: int, world_size: int, job: Config, run_dir: Path) -> tuple[Digests, int]:
    made = MovingTrainer(job, make_runtime(rank, world_size), run_dir, moves=False)
    digests = made.digests()
    return digests, made.run().steps


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_made_after_a_move_loads_on_other_ranks_under_a_new_plan(tmp_path: Path, ranks: int) -> None:
    job = settings(tmp_path, seed=1, steps=8)  # the last move comes at step 8, the checkpoint after it
    saved: Digests = {}
    for rank_digests in run_ranks(train_with_moves, 2, job, tmp_path / "run"):
        saved |= rank_digests
    on = settings(tmp_path, seed=1, steps=11).model_dump()
    on["autoshard"] |= {"enabled": True, "measure_plans": 0, "reshard": {"enabled": False}}
    results = run_ranks(load_and_go_on, ranks, Config.model_validate(on), tmp_path / "run")
    loaded = {name: digest for digests, _ in results for name, digest in digests.items()}
    assert loaded == saved
    assert {steps for _, steps in results} == {11}


def run_both(
    rank: int, world_size: int, resharded: Config, static: Config, folder: Path, full: int | None = None
) -> tuple[list[bool], Any]:
    """full: a rank that has no memory to spare. Returns what is equal at the end, and the last plan."""
    runtime = make_runtime(rank, world_size)
    if rank == full:
        reshard_agree.free_memory = lambda device=None: 0
    with trainer(static, runtime, folder / "static") as still:
        still.run()
        expected = tensors(still)
    with trainer(resharded, runtime, folder / "resharded") as moving:
        if moving.job.intervals.resharding is not None:
            force_moves(moving.job.intervals.resharding.controller)
        moving.run()
        found = tensors(moving)
    shared = sorted(expected.keys() & found.keys())
    return [bool((expected[name] == found[name]).all()) for name in shared], moving.job.embeddings.plan.to_json()


PLANS = ("0000", "1100", "0111")


def force_moves(controller: Controller | None) -> None:
    """It always goes for the next of PLANS: what is tested is everything around it."""

    def looked(base: Decision, task: PlacementTask, interval: Interval, plan: ShardingPlan, when: Horizon) -> Decision:
        assert controller is not None
        ranks = PLANS[len(controller.left) % len(PLANS)]
        rank_of = {table["name"]: int(rank) for table, rank in zip(TABLES, ranks, strict=True)}
        decision = plainly(base, task, interval, plan, when)
        return replace(decision, action="moved", predicted_gain=0.1, new_plan=ShardingPlan(rank_of, 2), old_plan=plan)

    if controller is not None:  # rank 0's
        plainly = controller._looked
        controller._looked = looked  # type: ignore[method-assign]
        controller.history.why_not_look = lambda *_, **__: ""  # type: ignore[method-assign]


def test_tables_move_in_training_and_no_bit_changes(tmp_path: Path) -> None:
    shape = {"epochs": 3}
    static = config(tmp_path, train=shape, autoshard={"placement": plan_file(tmp_path, "0101", 2)})
    resharded = config(
        tmp_path,
        train=shape,
        autoshard={
            "enabled": True,
            "measure_plans": 0,
            "reshard": {"checksums": True, "rollback": False},
        },
    )
    results = run_ranks(run_both, 2, resharded, static, tmp_path)
    assert all(all(same) and same for same, _ in results)
    assert losses(tmp_path / "resharded") == losses(tmp_path / "static")
    decisions = records(tmp_path / "resharded", "decisions.jsonl")
    assert [d["action"] for d in decisions] == ["moved"] * 3
    assert [d["epoch"] for d in decisions] == [0, 1, 2]
    assert all(d["bytes_moved"] > 0 and d["move_seconds"] > 0 and d["text"].startswith("moved ") for d in decisions[:1])
    assert decisions[0]["measured_gain"] is not None and decisions[-1]["measured_gain"] is None
    plans = [ShardingPlan.load(path) for path in sorted((tmp_path / "resharded" / "plan").glob("step_*.json"))]
    assert len(plans) >= 3
    for before, after, decision in zip(plans, plans[1:], decisions, strict=False):
        went = {(move["shard"], move["from_rank"], move["to_rank"]) for move in decision["moves"]}
        assert went == {(move.shard, move.source, move.destination) for move in before.moves_to(after)}
        assert sum(move["bytes"] for move in decision["moves"]) == decision["bytes_moved"]
    record = RunRecord.load(tmp_path / "resharded")
    assert [move["moves"] for move in result_of(record, plans[-1], {})["moves"]] == [d["moves"] for d in decisions]
    last = ShardingPlan.from_json(
        json.loads(sorted((tmp_path / "resharded" / "plan").glob("step_*.json"))[-1].read_text())
    )
    assert last.to_json() == results[0][1] == results[1][1]


def test_a_rank_without_memory_refuses_and_training_goes_on_under_the_old_plan(tmp_path: Path) -> None:
    shape = {"epochs": 2}
    static = config(tmp_path, train=shape, autoshard={"placement": plan_file(tmp_path, "0101", 2)})
    resharded = config(tmp_path, train=shape, autoshard={"enabled": True, "measure_plans": 0})
    results = run_ranks(run_both, 2, resharded, static, tmp_path, 1)
    assert all(all(same) and same for same, _ in results)
    decisions = records(tmp_path / "resharded", "decisions.jsonl")
    assert [d["action"] for d in decisions] == ["refused", "refused"]
    assert all("more for its new tables" in d["text"] and d["bytes_moved"] == 0 for d in decisions)
    first = ShardingPlan.from_json(json.loads(next((tmp_path / "resharded" / "plan").glob("step_*0.json")).read_text()))
    assert results[0][1] == results[1][1] == first.to_json()


def train_once(rank: int, world_size: int, job: Config, folder: Path) -> None:
    with trainer(job, make_runtime(rank, world_size), folder / "run") as made:
        made.run()


def test_resharding_starts_from_a_given_plan(tmp_path: Path) -> None:
    given = {"enabled": True, "measure_plans": 0, "placement": plan_file(tmp_path, "1000", 2)}
    run_ranks(train_once, 2, config(tmp_path, autoshard=given), tmp_path)
    first = ShardingPlan.load(tmp_path / "run" / "plan" / "step_00000000.json")
    assert first.rank_of == {"user": 1, "item": 0, "tag": 0, "shop": 0}
    [decision] = records(tmp_path / "run", "decisions.jsonl")
    assert decision["text"] == "kept: no steps are left" and decision["error_before"] is not None
