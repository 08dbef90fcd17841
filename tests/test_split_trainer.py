"""A job whose tables are split by columns: the same losses, checkpoints for any ranks and plans, parts in reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dlrm_autoshard.config import Config
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.tables import Shard, TableConfig
from dlrm_autoshard.training.checkpoints.saved_model import saved_model
from dlrm_autoshard.training.checkpoints.saved_weights import SavedWeights
from tests.ranks import run_ranks
from tests.split_jobs import WHOLE, job, predicted, train
from tests.split_plans import whole
from tests.trainers import TABLES, losses, make_runtime, trainer

SPLIT = {"user[0:4]": 1, "user[4:8]": 0, "item": 0, "tag[0:4]": 0, "tag[4:12]": 1, "tag[12:16]": 0, "shop": 1}
OTHER = {"user[0:4]": 2, "user[4:8]": 0, "item": 2, "tag[0:8]": 1, "tag[8:16]": 2, "shop": 1}


def same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> bool:
    one, other = ({k: v for k, v in whole(by_rank).items() if k.startswith("tables.")} for by_rank in (found, expected))
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def test_a_job_with_split_tables_trains_resumes_and_exports_as_one_without(tmp_path: Path) -> None:
    saved = {"checkpoint": {"enabled": True}}
    runs = [(job(tmp_path, "whole", WHOLE, 2), tmp_path / "whole"),
            (job(tmp_path, "split", SPLIT, 2, **saved), tmp_path / "split")]  # fmt: skip
    by_rank = run_ranks(train, 2, runs, timeout=120)
    unsplit, split = ([rank[i] for rank in by_rank] for i in range(2))
    assert same(split, unsplit)
    assert losses(tmp_path / "split") == losses(tmp_path / "whole")

    record = RunRecord.load(tmp_path / "split")
    assert record.last.plan.rank_of == SPLIT
    assert {table.name: table.embedding_dim for table in record.last.tables}["tag[4:12]"] == 8
    with open(tmp_path / "split" / "costs" / "rank_00001.jsonl") as lines:
        assert json.loads(next(lines))["tables"] == ["user[0:4]", "tag[4:12]", "shop"]

    on = job(tmp_path, "other", OTHER, 3, **saved)
    again = run_ranks(train, 3, [(on, tmp_path / "split")], timeout=120)
    assert same([rank[0] for rank in again], unsplit)

    (tmp_path / "split" / "config.yaml").write_text(on.to_yaml())
    with saved_model(tmp_path / "split") as model:
        for table in TABLES:
            weight = model.bags.sharded.storage.tensors(Shard(table["name"]))["weight"]
            assert torch.equal(weight, whole(unsplit)[f"tables.{table['name']}.weight"])
        weights = SavedWeights.open(max((tmp_path / "split" / "checkpoints").glob("step_*")), model.data.source.tables)
    exported = {name: tensor for name, tensor in weights.tensors() if name.startswith("tables.")}
    assert exported and all(torch.equal(tensor, whole(unsplit)[name]) for name, tensor in exported.items())
    alone, shared = (predicted(tmp_path / "split", ranks) for ranks in (1, 3))  # by 3 under OTHER
    assert np.allclose(alone, shared, atol=1e-6)


def test_a_table_that_fits_no_rank_whole_trains_exactly(tmp_path: Path) -> None:
    big = [{"name": "big", "num_embeddings": 20_000, "embedding_dim": 64}, *TABLES]
    table = TableConfig("big", 20_000, 64)
    data = {"data": {"tables": big}, "checkpoint": {"enabled": False}}
    room = 1.4 * table.weight_bytes / 2**30  # weight and Adagrad's state take twice the weight
    planning = {"enabled": True, "memory_gib": room, "measure_plans": 0, "reshard": {"enabled": False}}
    split = job(tmp_path, "split", None, 2, autoshard=planning, **data)
    unsplit = job(tmp_path, "whole", {"big": 0, **WHOLE}, 2, **data)
    by_rank = run_ranks(train, 2, [(unsplit, tmp_path / "whole"), (split, tmp_path / "split")], timeout=200)
    assert RunRecord.load(tmp_path / "split").last.plan.split_tables == ("big",)
    assert same([rank[1] for rank in by_rank], [rank[0] for rank in by_rank])
    assert losses(tmp_path / "split") == losses(tmp_path / "whole")


def test_a_split_plan_is_refused_for_rowwise_adagrad_unless_parts_may_have_their_own_sums(tmp_path: Path) -> None:
    by_name = {"tables": {"optimizer": {"name": "rowwise_adagrad", "lr": 0.1}}}
    with pytest.raises(Exception, match=r"splits table 'user'.*tables\.optimizer\.per_part: true"):
        run_ranks(train, 2, [(job(tmp_path, "split", SPLIT, 2, **by_name), tmp_path / "run")])
    by_name["tables"]["optimizer"]["per_part"] = True
    run_ranks(train, 2, [(job(tmp_path, "split", SPLIT, 2, **by_name), tmp_path / "run")])


def resumed(rank: int, world_size: int, jobs: list[tuple[Config, Path]]) -> list[tuple[ShardingPlan, list[str]]]:
    """Plan and notes of jobs that go on where each run's checkpoint is."""
    runtime, found = make_runtime(rank, world_size), []
    for settings, run_dir in jobs:
        with trainer(settings, runtime, run_dir) as made:
            found.append((made.job.placement.plan, list(made.job.notes)))
            made.run()
    return found


def test_a_checkpoints_plan_that_splits_more_than_is_allowed_by_now_is_not_taken(tmp_path: Path) -> None:
    once, twice = {"epochs": 1}, {"epochs": 2}
    rowwise = {"name": "rowwise_adagrad", "lr": 0.1}
    saved = {"checkpoint": {"enabled": True}}
    own = {"optimizer": {**rowwise, "per_part": True}}
    first = job(tmp_path, "split", SPLIT, 2, tables=own, train=once, **saved)
    run_ranks(train, 2, [(first, tmp_path / name) for name in ("sums", "parts", "most")], timeout=120)
    again = [
        (job(tmp_path, "sums", None, 2, tables={"optimizer": rowwise}, train=twice, **saved), tmp_path / "sums"),
        (job(tmp_path, "parts", None, 2, tables=own, train=twice, autoshard={"splits": {"max_parts": 2}}, **saved),
         tmp_path / "parts"),
        (job(tmp_path, "most", None, 2, tables=own, train=twice, autoshard={"splits": {"max_parts": 3}}, **saved),
         tmp_path / "most"),
    ]  # fmt: skip
    for sums, parts, most in run_ranks(resumed, 2, again, timeout=120):
        for plan, notes in (sums, parts):
            assert not plan.split_tables and any("tables were placed again" in note for note in notes)
        assert most[0].rank_of == SPLIT and not most[1]


def test_a_job_whose_pins_name_parts_is_planned_so_trains_and_decides(tmp_path: Path) -> None:
    pinned = {"tag[0:8]": 1, "tag[8:16]": 0, "user[0:4]": 0}
    asked = {"enabled": True, "pinned": pinned, "measure_plans": 2, "budget_seconds": 2, "reshard": {"min_gain": 0.0}}
    run_ranks(train, 2, [(job(tmp_path, "pinned", None, 2, autoshard=asked), tmp_path / "run")], timeout=120)
    last = RunRecord.load(tmp_path / "run").last
    assert {name: last.plan.rank_of[name] for name in pinned} == pinned
    decisions = [json.loads(line) for line in (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()]
    assert decisions and not any("pinned" in json.dumps(decision) for decision in decisions)
