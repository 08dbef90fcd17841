"""Figures leave a job: result.json, lines in a log, and the callbacks that the YAML names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_autoshard.config import parse_config
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.words import duration
from dlrm_autoshard.training.callbacks import Callback, find_callbacks, metric_scalars, profile_scalars
from dlrm_autoshard.training.stop_signals import StopSignals
from tests.ranks import run_ranks
from tests.report_records import make_profile
from tests.trainers import config, make_runtime, trainer

REPOSITORY = Path(__file__).parents[1]
CONFIG = parse_config({"data": {"source": "movielens"}})
TRACKER = """
import json
class Tracker:
    def __init__(self, run_dir, config):
        self.file = open(run_dir / "tracked.jsonl", "a")
        self.seed = config.run.seed
    def scalars(self, step, values):
        print(json.dumps([step, dict(values)]), file=self.file)
    def finish(self, result):
        print(json.dumps([self.seed, result["metrics"]]), file=self.file, flush=True)
"""


def test_a_job_leaves_lines_a_result_and_what_its_callback_was_told(tmp_path: Path) -> None:
    (tmp_path / "tracker.py").write_text(TRACKER)
    keys = ["train.epochs=1", "train.log_every_steps=10", "callbacks=['tracker.py:Tracker']", "autoshard.enabled=true"]
    command = [sys.executable, "-m", "dlrm_autoshard", "train", "debug_cpu", "--ranks=2", *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ") and "eta" in line]
    assert [line.split("  ")[0] for line in lines] == [f"step {n} of 40" for n in (10, 20, 30, 40)]
    assert all("examples/s" in line and "loss 0." in line for line in lines)

    run = tmp_path / "runs/debug_cpu"
    result = json.loads((run / "result.json").read_text())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert result["steps"] == 40 and result["split"] == "test"
    assert result["metrics"]["auc"] == metrics[-1]["auc"] and result["moves"] == []
    assert set(result["plan"]["rank_of"]) == {"user", "item", "clicked", "country", "coupon"}
    seconds = result["seconds"]
    assert min(seconds[phase] for phase in ("joining", "planning", "building", "evaluation", "training")) > 0
    parts = sum(seconds[phase] for phase in ("training", "evaluation", "checkpoints", "resharding"))
    assert parts == pytest.approx(seconds["total"], abs=0.01)

    environment = json.loads((run / "environment.json").read_text())
    assert "callbacks=['tracker.py:Tracker']" in environment["command"] and "commit" in environment

    tracked = [json.loads(line) for line in (run / "tracked.jsonl").read_text().splitlines()]
    assert tracked[-1] == [0, result["metrics"]]
    assert [step for step, values in tracked[:-1] if "train/logloss" in values] == [10, 20, 30, 40]
    assert any("stage/fwd_compute/slowest" in values for _, values in tracked[:-1])


def started(name: str, run_dir: Path) -> Callback:
    [make] = find_callbacks([name])
    return make(run_dir, CONFIG)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tensorbord", "'tensorbord' is none of tensorboard, wandb, mlflow, nor of the form package:factory."),
        ("nobody.py:Tracker", "callbacks: there is no file 'nobody.py'"),
    ],
)
def test_a_callback_that_is_not_there_is_a_sentence(name: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence.replace(".", r"\.")):
        find_callbacks([name])


def test_scalars_are_named_after_split_and_stage() -> None:
    line = {"schema": 1, "step": 50, "epoch": 0, "split": "val", "auc": 0.75, "ne": None}
    assert metric_scalars(line) == {"val/auc": 0.75}
    profile = make_profile(work=(1, 2))
    values = profile_scalars(profile)
    assert values["stage/fwd_compute/slowest"] == max(profile.stage_ms["fwd_compute"])
    assert values["step/balanced_ms"] == profile.balanced_ms


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = started("tensorboard", tmp_path)
    writer.scalars(50, {"val/auc": 0.75})
    writer.finish({})
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("val/auc")[0]
    assert (read.step, read.value) == (50, 0.75)


def test_tensorboard_has_a_step_that_was_done_again_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    killed = started("tensorboard", tmp_path)
    for step in (50, 100, 150):
        killed.scalars(step, {"train/step_ms": 1.0})
        killed.scalars(step, {"val/auc": 0.75})
    resumed = started("tensorboard", tmp_path)
    resumed.scalars(100, {"val/auc": 0.75})  # after the checkpoint of step 100, so once more
    resumed.scalars(150, {"train/step_ms": 2.0})
    resumed.finish({})
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    seen = [(scalar.step, scalar.value) for scalar in read.Scalars("train/step_ms")]
    assert seen == [(50, 1.0), (100, 1.0), (150, 2.0)]
    assert {scalar.step for scalar in read.Scalars("val/auc")} == {50, 100}


def interrupted_at_the_very_end(rank: int, world_size: int, folder: Path) -> list[str]:
    (folder / "late.py").write_text(LATE)
    os.chdir(folder)
    made_with = config(train={"max_steps": 4}).model_copy(update={"callbacks": ["late.py:Late"]})
    with StopSignals() as signals, trainer(made_with, make_runtime(rank, world_size), folder, signals=signals) as made:
        made.run()
        made.write_report()
    return sorted(path.name for path in folder.iterdir())


LATE = """
import os, signal
class Late:
    def __init__(self, run_dir, config): pass
    def scalars(self, step, values): pass
    def finish(self, result): os.kill(os.getpid(), signal.SIGINT)
"""


def test_a_signal_while_the_report_is_written_takes_nothing_back(tmp_path: Path) -> None:
    assert {"result.json", "report.html"} <= set(run_ranks(interrupted_at_the_very_end, 1, tmp_path)[0])


WANDB = """
import sys
from pathlib import Path
from dlrm_autoshard.config import parse_config
from dlrm_autoshard.training.callbacks import find_callbacks
[make] = find_callbacks(["wandb"])
writer = make(Path(sys.argv[1]), parse_config({"data": {"source": "movielens"}}))
writer.scalars(50, {"val/auc": 0.75})
writer.finish({"metrics": {"auc": 0.75}})
"""
"""A program of its own: under pytest W&B's service writes nothing."""


def test_wandb_keeps_what_was_written_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="W&B is not installed")
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run([sys.executable, "-c", WANDB, str(tmp_path)], env=environment, timeout=120)
    [kept] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert done.returncode == 0 and b"val/auc" in kept.read_bytes()


def test_mlflow_keeps_what_was_written_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    writer = started("mlflow", tmp_path)
    writer.scalars(50, {"val/auc": 0.75})
    writer.finish({"metrics": {"auc": 0.75}})
    [kept] = tmp_path.glob("mlruns/*/*/metrics/val/auc")
    assert kept.read_text().split()[1:] == ["0.75", "50"]
    [result] = tmp_path.glob("mlruns/*/*/artifacts/result.json")
    assert json.loads(result.read_text()) == {"metrics": {"auc": 0.75}}


@pytest.mark.parametrize(("seconds", "words"), [(41.6, "42 s"), (400.0, "7 min"), (12600.0, "3.5 h")])
def test_durations_are_for_people(seconds: float, words: str) -> None:
    assert duration(seconds) == words
