"""What people get wrong, through launch/train.py: one sentence, exit status 2, no traceback, nothing half-done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.jobs import TINY_CONFIG

REPOSITORY = Path(__file__).parents[1]
MANY = """
import contextlib, io, json, sys
sys.path.insert(0, "launch")
import train
for arguments in json.load(sys.stdin):
    sys.argv = ["train.py", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = train.main()
    print(json.dumps([status, out.getvalue(), err.getvalue()]), file=sys.__stdout__)
"""
"""Several jobs of one rank in one process, for importing torch takes longer than each."""


def command(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=150, cwd=REPOSITORY, env=env, input=stdin
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(TINY_CONFIG.replace("dir: runs", f"dir: {tmp_path / 'runs'}"))
    return path


def test_a_resume_with_another_model_leaves_the_run_as_it_was(config: Path, tmp_path: Path) -> None:
    run, other = f"--resume={tmp_path}/runs/job", [{"name": "user", "num_embeddings": 500}]
    options = [
        ["train.max_steps=2"],
        [run, "model.over_arch_layer_sizes=[6, 1]"],
        [run, f"data.tables={json.dumps(other)}"],
        [run, "data.train_samples=100"],
    ]
    ended = command("-c", MANY, stdin=json.dumps([["--config", str(config), *more] for more in options]))
    assert ended.returncode == 0, ended.stderr[-2000:]
    good, resumed, retabled, shrunk = map(json.loads, ended.stdout.splitlines())
    assert good[0] == 0, good[2]
    assert resumed[0] == 2 and "dense.over_mlp.0.weight is [64," in resumed[2] and "Nothing was loaded" in resumed[2]
    assert retabled[0] == 2 and "with other features (data.tables): 'user', 'item', in this order" in retabled[2]
    assert shrunk[0] == 2 and "at sample 128 of epoch 0 (from 0), but there are only 100 samples" in shrunk[2]
    assert not any("Traceback" in out + err for _, out, err in (resumed, retabled, shrunk))
    started = yaml.safe_load((tmp_path / "runs" / "job" / "config.yaml").read_text())
    assert started["model"]["over_arch_layer_sizes"] == [64, 1]


@pytest.fixture
def criteo(tmp_path: Path) -> Path:
    """A day of 1000 samples, 857 of them to train on, in batches of 2 x 32; a config that reads it."""
    generator = np.random.default_rng(0)
    np.save(tmp_path / "day_0_dense.npy", generator.random((1000, 13), np.float32))
    np.save(tmp_path / "day_0_sparse.npy", generator.integers(0, 40, (1000, 26), np.int32))
    np.save(tmp_path / "day_0_labels.npy", generator.integers(0, 2, (1000, 1), np.int32))
    (tmp_path / "tables.json").write_text(json.dumps({"num_embeddings": [40] * 26}))
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {{name: job, device: cpu, pin_cores: false, dir: {tmp_path / 'runs'}}}\n"
        f"data: {{source: criteo, dir: {tmp_path}}}\n"
        "train: {batch_size: 32, log_every_steps: 1}\n"
        "profile: {enabled: false}\n"
        "autoshard: {enabled: false}\n"
    )
    return path


def damage(folder: Path, name: str, sample: int, column: int, value: float) -> None:
    array = np.load(folder / f"day_0_{name}.npy")
    array[sample, column] = value
    np.save(folder / f"day_0_{name}.npy", array)


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=0")
    return command(*start, "launch/train.py", *arguments)


def test_an_id_out_of_range_stops_all_ranks_with_one_sentence(criteo: Path) -> None:
    damage(criteo.parent, "sparse", 9 * 64 + 32 + 7, 3, 40)  # in rank 1's half of step 9; statistics are of the first 8
    ended = torchrun("--config", str(criteo))
    said = [line for line in ended.stderr.splitlines() if line.startswith("[rank")]
    assert said == [
        "[rank 1] table 't_cat_3' has 40 rows (ids 0 to 39), but sample 615 (from 0) of split 'train' in epoch 0 has "
        f"id 40: row 615 (from 0) of '{criteo.parent}/day_0_*'. Fix the data or the table's rows, or set "
        "data.on_bad_id to 'clip' or 'hash'."
    ]
    assert "exitcode  : 2" in ended.stderr and "dlrm_autoshard/" not in ended.stderr.replace(said[0], "")


def test_a_dense_feature_that_is_no_number_names_sample_feature_and_files(criteo: Path) -> None:
    damage(criteo.parent, "dense", 5 * 64 + 32 + 7, 3, float("nan"))
    ended = torchrun("--config", str(criteo))
    said = [line for line in ended.stderr.splitlines() if line.startswith("[rank")]
    assert said == [
        "[rank 1] sample 359 (from 0) of split 'train' in epoch 0 has dense feature 3 (from 0) that is nan: row 359 "
        f"(from 0) of '{criteo.parent}/day_0_*'. Fill in a number, or leave such samples out."
    ]


NORMED = """
import torch
from dlrm_autoshard.model.dlrm import DenseArch

class Normed(DenseArch):
    def __init__(self, num_dense, tables):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(num_dense)
        self.last = torch.nn.Linear(num_dense + sum(table.embedding_dim for table in tables), 1)
    def bottom(self, dense_BF):
        return self.norm(dense_BF)
    def top(self, bottom_BD, pooled_BD):
        return self.last(torch.cat([bottom_BD, pooled_BD], 1)).squeeze(1)
"""


def test_a_batch_that_is_left_out_leaves_no_trace_in_batchnorm(criteo: Path) -> None:
    damage(criteo.parent, "dense", 5 * 64 + 7, 0, float("nan"))  # in rank 0's half, whose statistics all get
    (criteo.parent / "normed.py").write_text(NORMED)
    ended = torchrun("--config", str(criteo), "train.on_nan=skip", f"model.factory={criteo.parent}/normed.py:Normed")
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = [json.loads(line) for line in (criteo.parent / "runs/job/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "skipped_not_finite" in line] == [6]  # counted when done, from 1
    assert len([line for line in lines if "logloss" in line and line["split"] == "train"]) == 13
    assert all("not_finite" not in line and line["logloss"] is not None for line in lines if line["split"] == "test")


def test_a_loss_that_is_nan_names_step_rank_and_the_last_good_checkpoint(criteo: Path) -> None:
    for column in range(13):
        damage(criteo.parent, "dense", 5 * 64 + 32 + 7, column, 3e38)  # more than sums of them can hold
    # A checkpoint of step 5 would be of the weights that gave NaN, as far as anyone knows.
    ended = torchrun("--config", str(criteo), "checkpoint.every_steps=1", "checkpoint.keep=3")
    said = [line for line in ended.stderr.splitlines() if line.startswith("[rank")]
    assert len(said) == 1 and "the loss is nan at step 5, from rank 1. Last good checkpoint: " in said[0], ended.stderr
    assert f"{criteo.parent}/runs/job/checkpoints/step_00000004." in said[0]
    assert "exitcode  : 2" in ended.stderr
