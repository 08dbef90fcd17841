"""A plan for a TorchRec job elsewhere: module.json in, what DistributedModelParallel accepts out."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from dlrm_autoshard.commands.main import main
from tests import torchrec_jobs
from tests.ranks import run_ranks

BY_HAND = {
    "schema": 1,
    "modules": {
        "users": [
            {"name": "a", "num_embeddings": 60, "embedding_dim": 8, "features": ["f1", "f2"], "mean_pooling": 2.5},
            {"name": "b", "num_embeddings": 200, "embedding_dim": 4},
            {"name": "c", "num_embeddings": 30, "embedding_dim": 8, "pooling": "mean"},
            {"name": "d", "num_embeddings": 50, "embedding_dim": 4, "dtype": "fp16"},
        ],
        "items": [
            {"name": "a", "num_embeddings": 40, "embedding_dim": 12},
            {"name": "e", "num_embeddings": 90, "embedding_dim": 4},
        ],
    },
}


def plan(module: Path, out: Path, *more: str) -> int:
    return main(["plan", "--from-torchrec", str(module), "--devices", "2", "--out", str(out), *more])


def test_namesakes_in_two_modules_are_planned_apart(tmp_path: Path) -> None:
    (tmp_path / "module.json").write_text(json.dumps(BY_HAND))
    assert plan(tmp_path / "module.json", tmp_path / "plan.json", "--batch-size", "512", "--pin", "items.a=1") == 0
    record = json.loads((tmp_path / "plan.json").read_text())
    assert {path: sorted(tables) for path, tables in record.items()} == {"users": [*"abcd"], "items": ["a", "e"]}
    assert record["items"]["a"]["ranks"] == [1]
    assert record["users"]["a"]["sharding_spec"]["shards"][0]["shard_sizes"] == [60, 8]


def test_a_module_file_that_is_wrong_is_named_by_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, said in (
        ({"schema": 1, "modules": {}}, "modules"),
        ({"schema": 1, "modules": {"m": [{"name": "a", "num_embeddings": 0, "embedding_dim": 8}]}}, "num_embeddings"),
        ({"schema": 1, "modules": {"m": [{"name": "a", "num_embeddings": 9, "embedding_dim": 6}]}}, "multiple of 4"),
        (
            {"schema": 1, "modules": {"m": 2 * [{"name": "a", "num_embeddings": 9, "embedding_dim": 8}]}},
            "table named 'a'",
        ),
    ):
        (tmp_path / "module.json").write_text(json.dumps(wrong))
        assert plan(tmp_path / "module.json", tmp_path / "plan.json") != 0
        assert said in capsys.readouterr().err
    assert not (tmp_path / "plan.json").exists()


def train_under(rank: int, world_size: int, source: Path) -> tuple[list[float], dict[str, int]]:
    """source: plan.json or plan.py."""
    from dlrm_autoshard.torchrec.plan_format import to_sharding_plan

    assert torchrec_jobs.find_torchrec() is None
    if source.suffix == ".py":
        sharding_plan: Any = runpy.run_path(str(source))["sharding_plan"]
    else:
        sharding_plan = to_sharding_plan(json.loads(source.read_text()))
    model, optimizer = torchrec_jobs.sharded(sharding_plan)
    losses = [torchrec_jobs.train_step(model, optimizer, torchrec_jobs.features_of(rank, step)) for step in range(2)]
    return losses, {f"{path}.{t}": s.ranks[0] for path, own in model.plan.plan.items() for t, s in own.items()}


def save(rank: int, world_size: int, path: Path) -> None:
    assert torchrec_jobs.find_torchrec() is None
    from dlrm_autoshard.torchrec import save_modules

    save_modules(torchrec_jobs.Model(), path, torchrec_jobs.features_of(0, 0))


@pytest.mark.skipif(torchrec_jobs.WHY_NOT is not None, reason=torchrec_jobs.WHY_NOT or "")
def test_torchrec_trains_under_the_plan_as_json_and_as_python(tmp_path: Path) -> None:
    run_ranks(save, 1, tmp_path / "module.json", timeout=90)
    saved = json.loads((tmp_path / "module.json").read_text())["modules"]
    stats = saved["users"][0].pop("stats")
    assert saved["users"][0] == {
        "name": "a", "num_embeddings": 60, "embedding_dim": 8, "pooling": "sum", "dtype": "fp32",
        "features": ["f1", "f2"],
    }  # fmt: skip
    assert 0 < stats["mean_pooling"] < 6
    for name in ("plan.json", "plan.py"):
        assert plan(tmp_path / "module.json", tmp_path / name) == 0
    as_json, as_python = (run_ranks(train_under, 2, tmp_path / name, timeout=90) for name in ("plan.json", "plan.py"))
    assert as_json == as_python and len(set(as_json[0][1])) == 6
    assert set(as_json[0][1].values()) == {0, 1}
