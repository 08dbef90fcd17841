"""A job whose tables have settings of their own: trained, continued, evaluated, predicted with, exported, planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_autoshard.training.checkpoints.folder import CheckpointFolder
from dlrm_autoshard.training.checkpoints.manifest import read_manifest
from dlrm_autoshard.training.checkpoints.saved_weights import SavedWeights
from tests.jobs import said_by

CONFIG = """
run: {name: job, device: cpu, pin_cores: false, dir: runs}
data:
  source: synthetic
  train_samples: 600
  test_samples: 200
  tables:
    - {name: user, num_embeddings: 500}
    - {name: item, num_embeddings: 50, mean_pooling: 3.0}
    - {name: day, num_embeddings: 7}
    - {name: city, num_embeddings: 90}
    - {name: shop, num_embeddings: 40}
tables:
  embedding_dim: 16
  optimizer: {name: rowwise_adagrad, lr: 0.05}
  per_table:
    user: {dim: 32, dtype: fp16}
    item: {optimizer: {name: adagrad}, pooling: mean}
    day: {lr: 0.5, init: {normal: 0.1}}
    city: {frozen: true, dim: 8, init: {file: city.npy}}
    shop: {optimizer: {name: sgd, lr: 0.1}}
model: {dense_arch_layer_sizes: [16]}
schedule: {decay_start_step: 2, decay_steps: 10}
train: {batch_size: 32, epochs: 2}
autoshard: {budget_seconds: 1, reshard: {every_steps: 4}}
"""
CITY = np.random.default_rng(0).standard_normal((90, 8)).astype(np.float32)


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlrm_autoshard", "train", "config.yaml", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "config.yaml").write_text(CONFIG)
    np.save(folder / "city.npy", CITY)
    done = train(folder, "--ranks=2")
    assert done.returncode == 0, done.stderr
    return folder / "runs/job"


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    newest = CheckpointFolder(run / "checkpoints").newest()
    assert newest is not None
    weights = SavedWeights(newest, read_manifest(newest), {})
    return {name: weights._read(name) for name in weights.manifest.tensors}


def test_each_table_is_saved_in_its_own_format(run: Path) -> None:
    tensors = tensors_of(run)
    assert tensors["tables.user.weight"].dtype == torch.float16 and tensors["tables.user.momentum1"].shape == (500,)
    assert tensors["tables.item.momentum1"].shape == (50, 16) and tensors["tables.day.momentum1"].shape == (7,)
    assert "tables.shop.momentum1" not in tensors and "tables.city.momentum1" not in tensors
    assert torch.equal(tensors["tables.city.weight"], torch.from_numpy(CITY))


@pytest.mark.slow
def test_a_job_that_is_continued_ends_with_the_same_bits(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    np.save(tmp_path / "city.npy", CITY)
    assert train(tmp_path, "--ranks=2", "train.epochs=1").returncode == 0
    (tmp_path / "city.npy").unlink()  # wanted at the first start alone
    done = train(tmp_path, "--ranks=2", "--resume=runs/job")
    assert done.returncode == 0, done.stderr
    expected, found = tensors_of(run), tensors_of(tmp_path / "runs/job")
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def test_it_is_evaluated_predicted_with_exported_and_explained(run: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    again = json.loads(said_by("evaluate", str(run), "--json"))
    assert again["logloss"] == pytest.approx(lines[-1]["logloss"], abs=1e-6)
    said_by("predict", str(run), "--out", str(tmp_path / "p.npy"))
    assert np.load(tmp_path / "p.npy").shape == (200,)
    said_by("export", str(run), "--to", "numpy", "--out", str(tmp_path / "weights.npz"))
    exported = np.load(tmp_path / "weights.npz")
    assert np.array_equal(exported["tables.city.weight"], CITY)
    assert "sharding plan" in said_by("explain", str(run))


def test_a_file_of_another_shape_ends_it_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    np.save(tmp_path / "city.npy", CITY[:80])
    done = train(tmp_path, "--ranks=2")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "'city.npy' has 80 x 8 numbers, but table 'city', which starts from it, has 90 rows of 8" in done.stderr
    assert not (tmp_path / "runs").exists()
