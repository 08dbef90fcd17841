"""Metrics are their formulas, over the samples of all ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard.config import load_config
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.distributed.step import predict
from dlrm_autoshard.training.display import describe
from dlrm_autoshard.training.evaluation import binary_metrics, metrics_of
from dlrm_autoshard.training.selection import Selection
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


def test_predictions_that_are_not_finite_have_no_metrics_and_are_never_the_best() -> None:
    """AUC would rank them like any others: of a perfect one with a NaN in it torchmetrics makes 0.5."""
    found = binary_metrics(torch.tensor([-1.0, float("nan"), 1.0, 2.0]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert found == {"not_finite": 1.0} and describe(found) == "predictions that are not finite: 1"
    selection = Selection(keep_best="logloss")
    selection.add(1, found)
    assert selection.best is None
    selection.add(2, {"logloss": 0.5})
    assert selection.best is not None and selection.best.step == 2


def test_samples_are_ranked_by_logits_however_large_they_are() -> None:
    """Sigmoid is exactly 1 from 37 on, in double precision, and exactly 0 below -745."""
    labels = torch.tensor([0.0, 1.0, 0.0, 0.0])
    assert metrics_of(torch.tensor([40.0, 50.0, 1.0, 2.0]), labels, ["label"])["auc"] == 1.0
    assert binary_metrics(torch.tensor([-900.0, -800.0, -901.0, -902.0]), labels)["auc"] == 1.0
    assert binary_metrics(torch.tensor([40.0, 40.0, 1.0, 50.0]), labels)["auc"] == 0.5, "what ties ties"
    scale = torch.linspace(-1000, 1000, 501)
    some = (torch.arange(501) * 7919 % 13 < 5).float()
    assert binary_metrics(scale, some)["auc"] == binary_metrics(scale / 1000, some)["auc"], "their order is all"


def test_a_task_whose_predictions_are_not_finite_leaves_no_mean_of_the_others() -> None:
    """Of tasks with AUCs of 1 and 0.5 the mean is 0.75; it must not rise to 1 where the second one breaks."""
    logits, labels = torch.tensor([[-1.0, 0.0], [1.0, float("inf")]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    found = metrics_of(logits, labels, ["click", "buy"])
    assert found["auc.click"] == 1.0 and found["not_finite"] == found["not_finite.buy"] == 1.0
    assert not {"auc", "logloss", "ne"} & found.keys()
    logits[1, 1] = 0.0
    assert metrics_of(logits, labels, ["click", "buy"])["auc"] == 0.75


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
        probabilities = torch.sigmoid(predict(made.job.step.model, made.job.bags, batch, autocast=False))
        return probabilities.tolist(), batch.labels_B.int().tolist()


def test_evaluation_counts_every_sample_of_every_rank_once(tmp_path: Path) -> None:
    (predictions, labels), *_ = run_ranks(evaluate, 2, tmp_path, timeout=90)
    lines = [line for line in records(tmp_path) if line["split"] != "train"]
    assert [(line["split"], line["step"], line["epoch"]) for line in lines] == [("val", 4, 0), ("test", 6, 1)]
    seen = {key: lines[-1][key] for key in ("auc", "logloss", "ne", "calibration", "accuracy")}
    assert seen == pytest.approx(formulas(predictions, labels), abs=1e-6)


class Tf32Linear(torch.autograd.Function):
    """A stand-in for a GPU's tensor cores: operands keep 10 bits of mantissa, sums are fp32; there and back."""

    @staticmethod
    def rounded(values: torch.Tensor) -> torch.Tensor:
        return ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        inputs, weight = Tf32Linear.rounded(inputs), Tf32Linear.rounded(weight)
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (inputs, weight), rounded = ctx.saved_tensors, Tf32Linear.rounded(gradient)
        return rounded @ weight, rounded.T @ inputs, gradient.sum(0)


def auc_of(rank: int, world_size: int, folder: Path, products: str) -> float:
    if products == "tf32":
        torch.nn.functional.linear = Tf32Linear.apply  # of this process, which ends with the test
    dense_dtype = "bf16" if products == "bf16" else "fp32"
    made_with = load_config(
        Path(__file__).parents[1] / "configs" / "debug_cpu.yaml",
        [f"train.dense_dtype={dense_dtype}", "train.epochs=3", "checkpoint.enabled=false", "run.pin_cores=false"],
    )
    with trainer(made_with, make_runtime(rank, world_size), folder) as made:
        return made.run().metrics["auc"]


@pytest.mark.parametrize("products", ["bf16", "tf32"])
def test_coarser_products_leave_the_auc_what_it_is(products: str, tmp_path: Path) -> None:
    """bf16 by autocast on CPU, which rounds as a GPU does; tf32 by a stand-in."""
    (fp32,) = run_ranks(auc_of, 1, tmp_path / "fp32", "fp32", timeout=120)
    (other,) = run_ranks(auc_of, 1, tmp_path / products, products, timeout=120)
    assert fp32 > 0.8 and fp32 != other and other == pytest.approx(fp32, abs=0.005)
