"""Profiles of real runs say what was done to them: which rank had too much work, and which was starved of its core."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dlrm_autoshard.costs import STAGES, WAITS
from dlrm_autoshard.records.facts import RankInterval
from dlrm_autoshard.records.interval import IntervalProfile
from dlrm_autoshard.records.jsonl import read_jsonl
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.summary import summary
from tests.busy_core import busy_in_epochs
from tests.ranks import run_ranks
from tests.trainers import config, make_runtime, trainer

CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.slow  # seconds of work, but it times ranks: the machine must be otherwise idle

HEAVY, LIGHT = 120.0, 60.0  # ids a sample and table: more than the machine's own swings between its cores


def profiled(rank: int, world_size: int, run_dir: Path, sections: dict[str, Any], ranks: str) -> None:
    tables = sections["data"]["tables"]
    path = run_dir.parent / "plan.json"
    if rank == 0:
        placed = {table["name"]: int(owner) for table, owner in zip(tables, ranks, strict=True)}
        path.write_text(json.dumps({"schema": 1, "world_size": world_size, "rank_of": placed}))
    runtime = make_runtime(rank, world_size)
    with trainer(config(autoshard={"placement": str(path)}, **sections), runtime, run_dir) as made:
        made.run()


def run(folder: Path, pooling: list[float], ranks: str, **sections: Any) -> list[IntervalProfile]:
    """A run on two ranks, each on a core of its own; the gathered profiles of its epochs."""
    tables = [
        {"name": f"t{i}", "num_embeddings": 20_000, "embedding_dim": 64, "mean_pooling": mean}
        for i, mean in enumerate(pooling)
    ]
    every: dict[str, Any] = {
        "data": {"tables": tables, "train_samples": 30 * 2 * 1024, "reuse_batches": 2},
        "tables": {"optimizer": {"name": "rowwise_adagrad", "lr": 0.02}},
        "model": {"dense_arch_layer_sizes": [16, 64], "over_arch_layer_sizes": [8, 1]},
        # Rank 0 alone writes metrics, between steps: seldom, or the other would wait for that as well.
        "train": {"batch_size": 1024, "log_every_steps": 100},
        "profile": {"every_steps": 1, "warmup_steps": 5},
    } | sections
    run_ranks(profiled, 2, folder / "run", every, ranks, timeout=120, cores=[CORES[0], CORES[-1]])
    for rank in range(2):  # every rank's own file can be read, and says the same
        lines = [RankInterval.from_json(line) for line in read_jsonl(folder / f"run/costs/rank_{rank:05d}.jsonl")]
        assert all(time.median_ms >= 0 for line in lines for time in line.stages.values())
    return [IntervalProfile.from_json(line) for line in read_jsonl(folder / "run/costs/epochs.jsonl")]


def check_account(profile: IntervalProfile) -> None:
    """Stages and waits make up the step, and no time is negative."""
    assert profile.accounted == pytest.approx(1.0, abs=0.03)
    every = {**profile.stage_ms, **profile.wait_ms}
    assert set(every) == {*STAGES, *WAITS} and all(ms >= 0 for times in every.values() for ms in times)


@pytest.mark.skipif(len(CORES) < 2, reason="needs a core for each rank")
def test_a_rank_with_twice_the_lookups_is_named_with_stage_and_tables(tmp_path: Path) -> None:
    (profile,) = run(tmp_path, [LIGHT, LIGHT, HEAVY, HEAVY], "0011", profile={"every_steps": 1, "trace_steps": [7]})
    check_account(profile)
    assert profile.samples >= 20
    for stage in ("fwd_compute", "bwd_compute"):
        light, heavy = profile.stage_ms[stage]
        assert 1.3 < heavy / light < 3.0, (stage, light, heavy)
    found = profile.straggler
    assert found is not None
    assert (found.rank, found.cause) == (1, "load") and found.stage in ("fwd_compute", "bwd_compute")
    assert {name for name, _ in found.tables} == {"t2", "t3"}
    # The fast rank's time is waiting, most of it for rank 1's lookup and update; what it sends takes no longer.
    waits = [sum(profile.wait_ms[name][rank] for name in WAITS) for rank in range(2)]
    excess = sum(profile.stage_ms[s][1] - profile.stage_ms[s][0] for s in ("fwd_compute", "bwd_compute"))
    assert waits[0] - waits[1] > 0.5 * excess > 0
    for stage in ("fwd_comms", "bwd_comms", "grad_allreduce"):
        assert profile.stage_ms[stage][0] - profile.stage_ms[stage][1] < 0.3 * excess, stage

    for rank in range(2):
        trace = json.loads((tmp_path / f"run/traces/step_00000007_rank_{rank:05d}.json").read_text())["traceEvents"]
        spans = [event for event in trace if event.get("cat") == "stage"]
        assert {"fwd_compute", "fwd_comms", "bwd_compute", "grad_allreduce"} <= {span["name"] for span in spans}
        assert {span["name"] for span in spans} <= {*STAGES, *WAITS}
        assert all(span["dur"] >= 0 for span in spans) and any("embedding" in e.get("name", "").lower() for e in trace)


@pytest.mark.skipif(len(CORES) < 2, reason="needs a core for each rank")
def test_a_rank_whose_core_is_shared_for_a_while_is_starved_then_and_not_overloaded(tmp_path: Path) -> None:
    train = {"batch_size": 1024, "log_every_steps": 100, "epochs": 7}
    with busy_in_epochs(CORES[-1], 2, 4, tmp_path / "run"):
        profiles = run(tmp_path, [HEAVY, HEAVY, HEAVY, HEAVY], "0011", train=train)
    starved = [p.epoch for p in profiles if p.straggler is not None and p.straggler.cause == "starved of CPU"]
    assert starved == [2, 3, 4]
    for profile in profiles[2:5]:
        check_account(profile)
        shares, found = profile.cpu_share, profile.straggler
        assert found is not None and (found.rank, found.tables) == (1, ())
        assert shares[1] is not None and shares[1] < 0.9 and (shares[0] or 0) > shares[1]
        assert f"{shares[1]:.0%}" in found.sentence
    said = " ".join(summary(RunRecord.load(tmp_path / "run")))
    assert "rank 1 (starved of CPU) in intervals 2 to 4" in said  # epochs, where a config says that they are
