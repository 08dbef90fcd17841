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

REPOSITORY = Path(__file__).parents[1]
CONFIG = """
run: {name: job, device: cpu, pin_cores: false}
data:
  source: synthetic
  train_samples: 300
  test_samples: 0
  tables:
    - {name: user, num_embeddings: 500}
    - {name: item, num_embeddings: 50, mean_pooling: 3.0}
train: {batch_size: 64}
profile: {enabled: false}
"""
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
    path.write_text(CONFIG.replace("name: job", f"name: job, dir: {tmp_path / 'runs'}"))
    return path


def plan(path: Path, world_size: int, *tables: str) -> str:
    path.write_text(json.dumps({"schema": 1, "world_size": world_size, "rank_of": dict.fromkeys(tables, 0)}))
    return f"autoshard.placement={path}"


def table(**keys: object) -> str:
    return f"data.tables={json.dumps([{'name': 'user', 'num_embeddings': 500, **keys}])}"


def test_each_mistake_gets_its_sentence(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "torn.json").write_text('{"schema": 1, ')
    cases = {
        table(num_embeddings=4_000_000_000, embedding_dim=128): "GiB for its 1 tables but has",
        "autoshard.memory_gib=0.00001": "rank 0 needs 56.6 KiB for its 2 tables but has 10.5 KiB (46.1 KiB short)",
        plan(tmp_path / "ranks.json", 3, "user", "item"): "the plan is for 3 ranks, this job has 1",
        plan(tmp_path / "tables.json", 1, "user", "ad"): "it does not place 'item'; it places 'ad', which the model",
        f"autoshard.placement={tmp_path}/torn.json": "torn.json' is not JSON",
        f"autoshard.placement={tmp_path}/none.json": "none.json' cannot be read: No such file",
        "tables.embedding_dims.user=6": "needs a multiple of 4 (try 8)",
        "tables.embedding_dims.usr=8": "Did you mean 'user'?",
        table(num_embeddings=0): "num_embeddings",
        'data.tables=[{"name": "a", "num_embeddings": 5}, {"name": "a", "num_embeddings": 5}]': "one table named 'a'",
        "tables.optimizer.name=lamb": "rowwise_adagrad",
        "tables.optimizer.name=adam": "is for CUDA only; on CPU use rowwise_adagrad, adagrad or sgd",
        f"run.dir={tmp_path}/file": "cannot be made: Not a directory. Set run.dir",
        "run.device=cuda": "torch sees no GPU",
        "train.epoch=3": "Did you mean 'train.epochs'?",
    }
    if _has_gpu():
        del cases["run.device=cuda"]
    fine = ["--config", str(config), "train.max_steps=2"]
    other_model = ["--config", str(config), f"--resume={tmp_path}/runs/job", "model.over_arch_layer_sizes=[6, 1]"]
    other_tables = ["--config", str(config), f"--resume={tmp_path}/runs/job", table()]
    no_run = ["--config", str(config), "--resume", "run.name=nobody"]
    jobs = [["--config", str(config), change] for change in cases] + [fine, other_model, other_tables, no_run]
    ended = command("-c", MANY, stdin=json.dumps(jobs))
    assert ended.returncode == 0, ended.stderr[-2000:]
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    *wrong, good, resumed, retabled, missing = results
    for (change, sentence), (status, out, err) in zip(cases.items(), wrong, strict=True):
        assert sentence in err and status == 2, f"{change}: {status} {out} {err}"
        assert "Traceback" not in out + err, err
    assert good[0] == 0, good[2]
    assert resumed[0] == 2 and "dense.over_mlp.0.weight is [64," in resumed[2] and "Nothing was loaded" in resumed[2]
    assert retabled[0] == 2 and "is of another model: table 'item' is not in the model" in retabled[2]
    started = yaml.safe_load((tmp_path / "runs" / "job" / "config.yaml").read_text())
    assert started["model"]["over_arch_layer_sizes"] == [64, 1], "a resume that failed leaves the run as it was"
    assert missing[0] == 2 and "there is no run 'nobody'" in missing[2]
    # A job that never started leaves no checkpoint, and no record behind.
    made = {path.resolve().parent.parent.name for path in (tmp_path / "runs").glob("*/checkpoints/step_*")}
    assert made == {good[1].split("run directory ")[1].split()[0].rsplit("/", 1)[1]}


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists()


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
    damage(criteo.parent, "sparse", 5 * 64 + 32 + 7, 3, 40)  # in rank 1's half of step 5
    ended = torchrun("--config", str(criteo))
    said = [line for line in ended.stderr.splitlines() if line.startswith("[rank")]
    assert said == [
        "[rank 1] table 't_cat_3' has 40 rows (ids 0 to 39), but sample 359 (from 0) of split 'train' in epoch 0 has "
        "id 40. Fix the data or the table's rows, or set data.on_bad_id to 'clip' or 'hash'."
    ]
    assert "exitcode  : 2" in ended.stderr and "dlrm_autoshard/" not in ended.stderr.replace(said[0], "")


def test_a_loss_that_is_nan_names_step_rank_and_the_last_good_checkpoint(criteo: Path) -> None:
    damage(criteo.parent, "dense", 5 * 64 + 32 + 7, 0, float("nan"))
    runs = criteo.parent / "runs"
    # A checkpoint of step 5 would be of the weights that gave NaN, as far as anyone knows.
    ended = torchrun("--config", str(criteo), "checkpoint.every_steps=1", "checkpoint.keep=3")
    said = [line for line in ended.stderr.splitlines() if line.startswith("[rank")]
    assert len(said) == 1 and "the loss is nan at step 5, from rank 1. Last good checkpoint: " in said[0], ended.stderr
    assert f"{runs}/job/checkpoints/step_00000004." in said[0]
    assert "exitcode  : 2" in ended.stderr

    ended = torchrun("--config", str(criteo), "train.on_nan=skip")
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = [json.loads(line) for line in (runs / "job-2/metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "logloss" in line or "skipped_not_finite" in line}
    assert [step for step, line in steps.items() if "skipped_not_finite" in line] == [6]  # counted when done, from 1
    assert len([line for line in lines if "logloss" in line and line["split"] == "train"]) == 13


def test_sizes_that_no_machine_has_are_refused_with_what_is_asked_and_what_is_there(config: Path) -> None:
    cases = {
        "train.batch_size=100000000 data.train_samples=1000000000000": "a batch of 100,000,000 samples needs at least",
        "model.dense_arch_layer_sizes=[1000000,1000000,16]": "the dense layers have 1,000,",
        table(mean_pooling=1e12): "mean_pooling' is 1000000000000; it must be at most 100,000",
        "train.batch_size=yes": "'train.batch_size' is True; it must be a whole number",
        "run.device=gpu": "Did you mean 'cuda'?",
    }
    jobs = [
        ["--config", str(config), *(change.split() if change.startswith("train") else [change])] for change in cases
    ]
    ended = command("-c", MANY, stdin=json.dumps(jobs))
    assert ended.returncode == 0, ended.stderr[-2000:]
    for sentence, line in zip(cases.values(), ended.stdout.splitlines(), strict=True):
        status, _, err = json.loads(line)
        assert status == 2 and sentence in err and "Traceback" not in err, err
