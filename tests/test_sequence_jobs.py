"""Jobs whose model takes sequences: from lists in the data to an exported program, under any plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dlrm_autoshard.config import ConfigError, SequenceConfig, parse_config
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.data.sequences import Cuts, said_of_cuts
from dlrm_autoshard.data.statistics import SentOnce, measure_stats
from dlrm_autoshard.model.dlrm import make_model
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.plug_in import PlugInError
from dlrm_autoshard.records.interval import epochs_file
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks
from tests.trainers import config, losses, make_runtime, tensors, trainer

ROOT = Path(__file__).parents[1]
TOWER = f"{ROOT / 'launch/examples/attention.py'}:Attention"
TABLES = [
    {"name": "user", "num_embeddings": 40, "embedding_dim": 8},
    {"name": "candidate", "num_embeddings": 300, "embedding_dim": 8},
    {"name": "tag", "num_embeddings": 9, "embedding_dim": 16, "mean_pooling": 0.5},
    {"name": "clicks", "num_embeddings": 300, "embedding_dim": 8, "mean_pooling": 6.0},
]
SETTINGS: dict[str, Any] = {
    "data": {"tables": TABLES, "train_samples": 320, "test_samples": 41},
    "tables": {
        "shared": {"item": ["candidate", "clicks"]},
        "sequences": {"clicks": {"max_length": 5}},
        "optimizer": {"name": "adagrad", "lr": 0.1},
    },
    "model": {"factory": TOWER, "options": {"candidate": "candidate", "max_length": 5}},
    "checkpoint": {"enabled": True},
}


def jobs(rank: int, world_size: int, folder: Path, once: bool) -> dict[str, dict[str, Tensor]]:
    """One that plans, measures and moves; one under a fixed plan; one in two starts; one in parts."""
    runtime, found = make_runtime(rank, world_size), {}
    settings = {**SETTINGS, "tables": {**SETTINGS["tables"], "rows_once": once}}
    planned = {"enabled": True, "measure_plans": 2, "budget_seconds": 2.0, "reshard": {"every_steps": 5}}
    fixed = {"placement": str(folder / "plan.json")}
    for name, autoshard, train in [
        ("planned", planned, {"max_steps": 30}), ("fixed", fixed, {"max_steps": 30}),
        ("again", fixed, {"max_steps": 12}), ("again", planned, {"max_steps": 30}),
        ("in parts", fixed, {"max_steps": 30, "accumulate": 3}),
    ]:  # fmt: skip
        own = config(folder, **settings, autoshard=autoshard, train={"epochs": 3, **train})
        with trainer(own, runtime, folder / name) as made:
            made.run()
            found[name] = tensors(made)
    return found


def merged(by_rank: list[dict[str, Tensor]], table: str) -> Tensor:
    return next(own[f"tables.{table}.weight"] for own in by_rank if f"tables.{table}.weight" in own)


@pytest.mark.parametrize("once", [True, False])
def test_a_job_plans_moves_and_resumes_without_a_bit_changed(tmp_path: Path, once: bool) -> None:
    ShardingPlan({"item": 1, "user": 0, "tag": 0}, 2).save(tmp_path / "plan.json")
    ranks = run_ranks(jobs, 2, tmp_path, once, timeout=150)
    item = {name: merged([rank[name] for rank in ranks], "item") for name in ranks[0]}
    assert item["fixed"].shape == (300, 8)
    assert torch.equal(item["planned"], item["fixed"]) and torch.equal(item["again"], item["fixed"])
    assert losses(tmp_path / "planned") == losses(tmp_path / "fixed")
    settings = config(tmp_path, **SETTINGS)
    source = open_source(settings.data, settings.tables)
    features, batch_size = Features.of(source.tables, settings.tables.shared, ["clicks"]), settings.train.batch_size
    stats = measure_stats(source, 2 * batch_size, 20, features, once=SentOnce(batch_size, once))
    lengths = torch.cat([source.read("train", 0, 0, 320).lengths_TB[3]]).clamp(max=5).float().mean()
    every = 1 + lengths.item()
    assert stats[1].features < 0.99 * every if once else stats[1].features == pytest.approx(every)
    assert stats[0].features == 1
    for record in map(json.loads, epochs_file(tmp_path / "fixed").read_text().splitlines()):
        seen = dict(zip(record["tables"]["name"], record["tables"]["features"], strict=True))
        assert seen["item"] == pytest.approx(stats[1].features, rel=0.2) and seen["user"] == 1
    torch.testing.assert_close(item["in parts"], item["fixed"], rtol=1e-3, atol=1e-4)


def started(folder: Path, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "dlrm_autoshard", *arguments], cwd=folder, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


@pytest.mark.filterwarnings("ignore:No complete tensor found:UserWarning")  # of torch.export, of itself
def test_predictions_by_two_ranks_are_the_exported_programs(tmp_path: Path) -> None:
    settings = config(tmp_path / "runs", **SETTINGS, run={"name": "clicks"}, train={"max_steps": 20})
    (tmp_path / "clicks.yaml").write_text(settings.to_yaml())
    run = tmp_path / "runs/clicks"
    said = started(tmp_path, "train", str(tmp_path / "clicks.yaml"), "--ranks=2")
    assert "sequence 'clicks'" in said and "the newest 5 are kept" in said
    started(tmp_path, "predict", str(run), f"--out={tmp_path / 'two.npy'}", "--ranks=2")
    started(tmp_path, "export", str(run), f"--out={tmp_path / 'model.pt2'}")
    ours = np.load(tmp_path / "two.npy")
    batch = open_source(settings.data, settings.tables).read("test", 0, 0, 41)
    lengths = batch.lengths_TB.long()
    values = list(batch.values_N.long().split(lengths.sum(1).tolist()))
    offsets = list(lengths.cumsum(1) - lengths)
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert np.allclose(ours, program(batch.dense_BF, values, offsets).detach().numpy(), atol=1e-5)


def batch_of(lists: list[list[int]], weighted: bool = False) -> Batch:
    """One feature 'a' of a single id a sample, and 'b' with these lists."""
    lengths = torch.tensor([[1] * len(lists), [len(own) for own in lists]], dtype=torch.int32)
    values = torch.tensor([0] * len(lists) + [i for own in lists for i in own])
    weights = torch.arange(len(values)).float() if weighted else None
    size = len(lists)
    return Batch(torch.zeros(size, 0), lengths, values, torch.zeros(size), size, size, weights)


@pytest.mark.parametrize(("keep", "left"), [("newest", [2, 3, 4, 5, 6]), ("oldest", [1, 2, 4, 5, 6])])
def test_longer_lists_keep_their_newest_or_oldest_ids(keep: Any, left: list[int]) -> None:
    tables = [TableConfig("a", 9, 4), TableConfig("b", 9, 4)]
    cuts = Cuts({"b": SequenceConfig(max_length=2, keep=keep)})
    cut = cuts(batch_of([[1, 2, 3], [], [4], [5, 6]], weighted=True), tables)
    assert cut.lengths_TB.tolist() == [[1] * 4, [2, 0, 1, 2]]
    assert cut.values_N.tolist() == [0] * 4 + left
    assert cut.weights_N is not None and cut.weights_N.tolist() == [0, 1, 2, 3, *(3.0 + place for place in left)]
    whole = batch_of([[1, 2], []])
    assert cuts(whole, tables) is whole


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    unpooled = {"sequences": {"item": {"max_length": 5}}}
    with pytest.raises(ConfigError, match=r"tables.sequences has 'item', but the built-in DLRM pools every feature"):
        config(tmp_path, tables=unpooled)
    with pytest.raises(ConfigError, match=r"'tables.sequences.item.max_length' is 0"):
        config(tmp_path, tables={"sequences": {"item": {"max_length": 0}}}, model={"factory": TOWER})
    (tmp_path / "deaf.py").write_text("def Deaf(num_dense, tables): ...")
    made = config(tmp_path, tables=unpooled, model={"factory": f"{tmp_path / 'deaf.py'}:Deaf"})
    item = TableConfig("item", 9, 4)
    with pytest.raises(PlugInError, match=r"has no parameter `sequences`, but tables.sequences names 'item'"):
        make_model(3, [], made.model, sequences={"item": item})
    wrong = parse_config({**made.model_dump(mode="json"), "tables": {"sequences": {"itm": {"max_length": 5}}}})
    with pytest.raises(DataError, match=r"'itm' is not a feature. Did you mean 'item'"):
        open_source(wrong.data, wrong.tables)
    source = open_source(made.data, made.tables)
    assert said_of_cuts(source) == []
