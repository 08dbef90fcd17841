"""Evaluations within an epoch, the best checkpoint, early stopping: the same whether or not a job is interrupted."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dlrm_autoshard.config import Config, ConfigError
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.training.checkpoints.folder import run_and_checkpoint
from dlrm_autoshard.training.checkpoints.saved_model import saved_model
from dlrm_autoshard.training.evaluation import binary_metrics
from dlrm_autoshard.training.stop_signals import Stopped, StopSignals
from dlrm_autoshard.training.trainer import TrainResult
from tests.ranks import run_ranks
from tests.trainers import config, losses, make_runtime, records, trainer

PATIENCE = 3


def settings(run_dir: Path | str = "runs", **changes: Any) -> Config:
    """250 samples in epochs of 16 steps on 2 ranks, learning so fast that it overfits; evaluated every 3 steps."""
    sections: dict[str, Any] = {
        "data": {"val_samples": 60, "test_samples": 60},
        "train": {"epochs": 12, "eval_every_steps": 3},
        "checkpoint": {"enabled": True, "every_steps": 5, "keep": 1, "keep_best": "auc"},
        "tables": {"optimizer": {"name": "sgd", "lr": 2.0}},
    }
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    return config(run_dir, **sections)


def run_once(rank: int, world_size: int, folder: Path, made_with: Config) -> TrainResult:
    with trainer(made_with, make_runtime(rank, world_size), folder) as made:
        result = made.run()
        made.write_report()
        return result


def run_in_pieces(rank: int, world_size: int, folder: Path, made_with: Config, stops: list[int]) -> TrainResult:
    """Stopped after each of these steps, and resumed."""
    runtime = make_runtime(rank, world_size)
    for stop in stops:
        train = made_with.train.model_copy(update={"max_steps": stop})
        with trainer(made_with.model_copy(update={"train": train}), runtime, folder) as made:
            made.run()
    return run_once(rank, world_size, folder, made_with)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [line for line in records(folder) if line["split"] == "val"]


def test_evaluations_within_an_epoch_change_no_bit_and_the_best_checkpoint_outlives_newer_ones(tmp_path: Path) -> None:
    only_training: dict[str, Any] = {
        "train": {"epochs": 2, "eval_every_steps": None},
        "checkpoint": {"enabled": False, "keep_best": None},
    }
    run_ranks(run_once, 2, tmp_path / "never", settings(**only_training), timeout=90)
    run_ranks(run_once, 2, tmp_path / "often", settings(tmp_path, train={"epochs": 2}), timeout=90)
    assert losses(tmp_path / "often") == losses(tmp_path / "never")
    steps = [line["step"] for line in evaluations(tmp_path / "often")]
    assert steps == [*range(3, 16, 3), 16, *range(18, 32, 3), 32]

    best = max(evaluations(tmp_path / "often"), key=lambda line: (line["auc"], -line["step"]))
    checkpoints = tmp_path / "often" / "checkpoints"
    name = f"step_{best['step']:08d}"
    assert os.readlink(checkpoints / "best") == name
    assert {path.name for path in checkpoints.iterdir()} == {"best", name, "step_00000032"}
    (tmp_path / "often" / "config.yaml").write_text(settings(tmp_path, train={"epochs": 2}).to_yaml())
    with saved_model(tmp_path / "often", Path("best")) as saved:
        found = saved.logits("val")
    assert found is not None
    again = binary_metrics(*found)
    assert saved.step == best["step"] and again["auc"] == pytest.approx(best["auc"], abs=1e-6)
    assert run_and_checkpoint(str(checkpoints / "best")) == (str(tmp_path / "often"), checkpoints / name)


def test_a_job_whose_best_checkpoint_is_not_its_last_tells_what_that_is_worth(tmp_path: Path) -> None:
    stopping = {"early_stopping": {"metric": "logloss", "patience": PATIENCE}}
    ends_early = settings(tmp_path, train=stopping, checkpoint={"keep_best": "logloss"})
    [trained, _] = run_ranks(run_once, 2, tmp_path, ends_early, timeout=90)
    result = json.loads((tmp_path / "result.json").read_text())
    best = result["best"]["step"]
    assert os.readlink(tmp_path / "checkpoints" / "best") == f"step_{best:08d}" and best < trained.steps
    (tmp_path / "config.yaml").write_text(ends_early.to_yaml())
    with saved_model(tmp_path, Path("best"), splits=["test"]) as saved:
        found = saved.logits("test")
    assert found is not None
    again = binary_metrics(*found)
    assert result["best"]["test"]["auc"] == pytest.approx(again["auc"], abs=1e-6) != result["metrics"]["auc"]
    assert records(tmp_path)[-1]["step"] == trained.steps, "of metrics.jsonl the last lines are the last step's"


def read_slowly(rank: int, world_size: int, folder: Path) -> tuple[int, int]:
    """How many read from the data at once, at most, and how often they did."""
    readers, most, calls = 0, 0, 0
    with trainer(settings(folder, train={"epochs": 1}), make_runtime(rank, world_size), folder) as made:
        read = made.job.data.source.read

        def slow(*place: Any) -> Any:
            nonlocal readers, most, calls
            readers, calls = readers + 1, calls + 1
            most = max(most, readers)
            time.sleep(0.01)
            readers -= 1
            return read(*place)

        made.job.data.source.read = slow  # type: ignore[method-assign, assignment]
        made.job.data.source.parallel_reads = False  # type: ignore[attr-defined]
        made.run()
    return most, calls


def test_an_evaluation_within_an_epoch_never_reads_while_the_epoch_is_read(tmp_path: Path) -> None:
    """A source that does not say `parallel_reads`: one that seeks in a file would give one the other's samples."""
    [(most, calls)] = run_ranks(read_slowly, 1, tmp_path, timeout=90)
    assert most == 1 and calls > 100


@pytest.mark.parametrize("stops", [[7, 18], [16, 21, 30]], ids=str)
def test_early_stopping_ends_at_the_same_step_however_often_it_was_interrupted(
    stops: list[int], tmp_path: Path
) -> None:
    patient = settings(train={"early_stopping": {"metric": "logloss", "patience": PATIENCE}})
    whole = run_ranks(run_once, 2, tmp_path / "whole", patient, timeout=90)
    pieces = run_ranks(run_in_pieces, 2, tmp_path / "pieces", patient, stops, timeout=90)
    found = evaluations(tmp_path / "whole")
    best = min(range(len(found)), key=lambda number: found[number]["logloss"])
    assert len(found) == best + 1 + PATIENCE, "it ends when so many in a row were no better"
    assert whole[0].steps == found[-1]["step"] < 12 * 16
    assert [result.steps for result in pieces] == [whole[0].steps] * 2
    # A piece that ends is evaluated where it ended; those of the whole run are among them, alike.
    extra = [line for line in evaluations(tmp_path / "pieces") if line["step"] in stops and line["step"] % 3]
    assert [line for line in evaluations(tmp_path / "pieces") if line not in extra or line["step"] == 16] == found
    assert losses(tmp_path / "pieces") == losses(tmp_path / "whole")
    ends = [
        run_ranks(weights_of, 1, tmp_path / run / "checkpoints" / "best", timeout=60)[0] for run in ("whole", "pieces")
    ]
    assert ends[0] == ends[1]

    (tmp_path / "whole" / "config.yaml").write_text(patient.to_yaml())
    assert (tmp_path / "whole" / "result.json").exists()
    assert RunRecord.load(tmp_path / "whole").stopped_early is None

    again = run_ranks(run_once, 2, tmp_path / "whole", patient, timeout=90)
    assert again[0].steps == whole[0].steps, "a job that has ended early goes on no further"


def best_after_a_stop(rank: int, world_size: int, folder: Path) -> tuple[int | None, bool, bool]:
    """The step that is best after a stop in mid-epoch; and whether it is known when a resumed job has begun."""
    runtime, best_at = make_runtime(rank, world_size), 7
    stopped = settings(train={"max_steps": best_at})
    with trainer(stopped, runtime, folder) as made:
        made.run()
        if rank == 0:
            made.job.checkpoints.point_best_at(best_at)  # whatever was measured: as if it had been the best
        runtime.barrier()
    with trainer(settings(train={"max_steps": 8}), runtime, folder) as made:
        kept = made.job.selection.kept
        assert kept is not None
        before = kept.value is not None
        made._begin()
        return kept.step, before, kept.value is not None


def test_the_best_checkpoint_is_known_again_after_a_stop_in_mid_epoch(tmp_path: Path) -> None:
    """Its evaluation came after it, so no checkpoint knows of that."""
    for step, before, after in run_ranks(best_after_a_stop, 2, tmp_path, timeout=90):
        assert (step, before, after) == (7, False, True)


def test_a_run_that_is_given_more_steps_keeps_the_evaluation_that_its_best_is_named_by(tmp_path: Path) -> None:
    """The end of a job is evaluated wherever it falls; nothing is due there once the job goes on."""
    grows = settings(train={"epochs": 1, "max_steps": 10, "eval_every_steps": None}, data={"test_samples": 60})
    run_ranks(run_in_pieces, 2, tmp_path, grows, [7], timeout=90)
    lines = [(line["step"], line["split"]) for line in records(tmp_path) if line["split"] != "train"]
    assert lines == [(7, "val"), (7, "test"), (10, "val"), (10, "test")]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["best"]["step"], "val") in lines and result["best"]["step"] in (7, 10)


def stopped_in_an_evaluation(rank: int, world_size: int, folder: Path) -> str:
    """Between epochs, while the best checkpoint is written."""
    seldom = settings(
        train={"epochs": 4, "eval_every_steps": None}, checkpoint={"every_steps": None, "every_epochs": 4}
    )
    with (
        StopSignals() as signals,
        trainer(seldom, make_runtime(rank, world_size), folder, signals=signals) as made,
    ):
        select = made.evaluations.select

        def asked_to_stop() -> None:
            if made.job.position.epoch == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            select()

        made.evaluations.select = asked_to_stop  # type: ignore[method-assign]
        with pytest.raises(Stopped) as caught:
            made.run()
        return str(caught.value)


def test_a_signal_in_an_evaluation_between_epochs_loses_no_step(tmp_path: Path) -> None:
    for said in run_ranks(stopped_in_an_evaluation, 2, tmp_path, timeout=90):
        assert said.startswith("stopped by SIGTERM after step 33. --resume continues from") and "step_00000033" in said


def weights_of(rank: int, world_size: int, checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.glob("rank_*.bin")}


def no_val(rank: int, world_size: int, folder: Path) -> str:
    with (
        pytest.raises(UserError) as caught,
        trainer(settings(data={"val_samples": 0}), make_runtime(rank, world_size), folder),
    ):
        pass
    return str(caught.value)


def test_nothing_is_chosen_by_the_test_split(tmp_path: Path) -> None:
    assert (
        "choose by evaluations on the val split, but this data has no val samples" in run_ranks(no_val, 1, tmp_path)[0]
    )


def test_the_best_of_no_checkpoints_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_best needs checkpoint\.enabled: true"):
        settings(checkpoint={"enabled": False})
