"""Metrics are their formulas, over the samples of all ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard.config import load_config
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.distributed.step import predict
from dlrm_autoshard.train.metrics import binary_metrics
from tests.ranks import run_ranks
from tests.trainers import config, make_runtime, records, trainer


def formulas(predictions: list[float], labels: list[int]) -> dict[str, float]:
    pairs = list(zip(predictions, labels, strict=True))
    entropy = lambda p, y: -(math.log(p) if y else math.log1p(-p))  # noqa: E731
    logloss = sum(entropy(p, y) for p, y in pairs) / len(pairs)
    base = sum(labels) / len(labels)
    result = {"logloss": logloss, "accuracy": sum((p > 0.5) == bool(y) for p, y in pairs) / len(pairs)}
    if base > 0:
        result["calibration"] = sum(predictions) / sum(labels)
    if 0 < base < 1:
        ups, downs = [p for p, y in pairs if y], [p for p, y in pairs if not y]
        wins = sum((up > down) + (up == down) / 2 for up in ups for down in downs)  # ties count half
        result["auc"] = wins / (len(ups) * len(downs))
        result["ne"] = logloss / sum(entropy(base, y) / len(labels) for y in labels)
    return result


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 19).filter(lambda p: p != 10), st.booleans()), min_size=1, max_size=30))
def test_metrics_are_their_formulas(samples: list[tuple[int, bool]]) -> None:
    predictions, labels = [p / 20 for p, _ in samples], [int(y) for _, y in samples]
    seen = binary_metrics(torch.logit(torch.tensor(predictions, dtype=torch.float64)), torch.tensor(labels).float())
    assert seen == pytest.approx(formulas(predictions, labels), abs=1e-6)


def test_a_sure_and_wrong_prediction_costs_what_its_logit_says() -> None:
    assert binary_metrics(torch.tensor([300.0, -300.0]), torch.tensor([0.0, 1.0]))["logloss"] == pytest.approx(300.0)


def test_no_sample_has_no_metric() -> None:
    assert binary_metrics(torch.empty(0), torch.empty(0)) == {}


def evaluate(rank: int, world_size: int, run_dir: Path) -> tuple[list[float], list[int]]:
    """A run of 4 steps; then each rank's own predictions for all test samples, batch by batch."""
    made_with = config(
        data={"train_samples": 64, "test_samples": 101, "val_samples": 37},
        train={"max_steps": 6, "epochs": 2, "eval_batch_size": 9},
    )
    with trainer(made_with, make_runtime(rank, world_size), run_dir) as made:
        made.run()
        source = open_source(made_with.data, made_with.tables)
        batch = source.read("test", 0, 0, 101)
        probabilities = torch.sigmoid(predict(made.step.model, made.embeddings, batch, autocast=False))
        return probabilities.tolist(), batch.labels_B.int().tolist()


def test_evaluation_counts_every_sample_of_every_rank_once(tmp_path: Path) -> None:
    (predictions, labels), *_ = run_ranks(evaluate, 2, tmp_path, timeout=90)
    lines = [line for line in records(tmp_path) if line["split"] != "train"]
    assert [(line["split"], line["step"], line["epoch"]) for line in lines] == [("val", 4, 0), ("test", 6, 1)]
    seen = {key: lines[-1][key] for key in ("auc", "logloss", "ne", "calibration", "accuracy")}
    assert seen == pytest.approx(formulas(predictions, labels), abs=1e-6)


def auc_of(rank: int, world_size: int, folder: Path, dense_dtype: str) -> float:
    made_with = load_config(
        Path(__file__).parents[1] / "configs" / "debug_cpu.yaml",
        [f"train.dense_dtype={dense_dtype}", "train.epochs=3", "checkpoint.enabled=false", "run.pin_cores=false"],
    )
    with trainer(made_with, make_runtime(rank, world_size), folder) as made:
        return made.run().metrics["auc"]


def test_bf16_products_leave_the_auc_what_it_is(tmp_path: Path) -> None:
    """By autocast on CPU: the same roundings as on a GPU."""
    (fp32,) = run_ranks(auc_of, 1, tmp_path / "fp32", "fp32", timeout=120)
    (bf16,) = run_ranks(auc_of, 1, tmp_path / "bf16", "bf16", timeout=120)
    assert fp32 > 0.8 and fp32 != bf16 and bf16 == pytest.approx(fp32, abs=0.005)
