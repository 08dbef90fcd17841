"""A run's directory is one job's alone; every start's config is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrm_autoshard.config import Config, parse_config
from dlrm_autoshard.train.run_directory import (
    RunDirectoryError,
    changes_since_last_start,
    claimed_run_dir,
    record_start,
)


def config(folder: Path, **train: Any) -> Config:
    tables = [{"name": "a", "num_embeddings": 5}]
    return parse_config(
        {"run": {"name": "job", "dir": str(folder)}, "data": {"source": "synthetic", "tables": tables}, "train": train}
    )


def finish(run: Path) -> None:
    (run / "checkpoints" / "step_00000010").mkdir(parents=True)


def test_a_taken_name_gets_a_number_and_a_failed_start_is_taken_again(tmp_path: Path) -> None:
    for _ in range(2):  # nothing came of the first
        with claimed_run_dir(config(tmp_path), None) as path:
            assert path == tmp_path / "job"
    finish(path)
    with claimed_run_dir(config(tmp_path), None) as path:
        record_start(path, config(tmp_path), 1)
        assert path == tmp_path / "job-2" and (tmp_path / "latest").resolve() == path


def test_two_jobs_at_once_never_share_a_directory(tmp_path: Path) -> None:
    with (
        claimed_run_dir(config(tmp_path), None) as one,
        claimed_run_dir(config(tmp_path), None) as other,  # before the first has written anything
    ):
        assert (one.name, other.name) == ("job", "job-2")
        finish(one)
        with (
            pytest.raises(RunDirectoryError, match=rf"another job \(process {os.getpid()} on .*\) is still writing to"),
            claimed_run_dir(config(tmp_path), ""),
        ):
            pass
    with claimed_run_dir(config(tmp_path), "") as again:
        assert again == one


def test_a_killed_job_lets_go_of_its_directory(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from tests.test_run_directory import *\n"
        "with claimed_run_dir(config(Path(sys.argv[1])), None) as run: finish(run); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[1], timeout=60)
    assert killed.returncode == -9
    with claimed_run_dir(config(tmp_path), "") as run:
        assert run == tmp_path / "job"


def test_resume_takes_the_newest_run_that_has_a_checkpoint(tmp_path: Path) -> None:
    with (
        pytest.raises(RunDirectoryError, match="no run 'job' with a checkpoint"),
        claimed_run_dir(config(tmp_path), ""),
    ):
        pass
    with claimed_run_dir(config(tmp_path), None) as run:
        finish(run)
    with claimed_run_dir(config(tmp_path), None):
        pass  # fails before it has trained
    with claimed_run_dir(config(tmp_path), "") as resumed:
        assert resumed == run


def test_a_continued_run_has_the_latest_config_and_keeps_the_earlier_ones(tmp_path: Path) -> None:
    with claimed_run_dir(config(tmp_path), None) as run:
        record_start(run, config(tmp_path, epochs=2), 2)
        finish(run)
        assert changes_since_last_start(run) == []
    os.utime(run / "config.yaml", (0, 0))
    with claimed_run_dir(config(tmp_path), str(tmp_path / "latest")) as linked:
        record_start(linked, config(tmp_path, epochs=4), 3)
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["epochs"] == 4
    assert json.loads((run / "environment.json").read_text())["world_size"] == 3
    earlier = run / "starts" / "1970-01-01T00-00-00Z"
    assert yaml.safe_load((earlier / "config.yaml").read_text())["train"]["epochs"] == 2
    assert json.loads((earlier / "environment.json").read_text())["world_size"] == 2
    assert changes_since_last_start(run) == ["train.epochs 2 -> 4"]
    assert (tmp_path / "latest").resolve() == run, "a run continued through the link does not bend the link"


def test_torchruns_restart_continues_its_own_jobs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with claimed_run_dir(config(tmp_path), None) as own:
        record_start(own, config(tmp_path), 1)
        finish(own)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    with claimed_run_dir(config(tmp_path), None) as other:
        record_start(other, config(tmp_path), 1)
        finish(other)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with claimed_run_dir(config(tmp_path), None) as run:
        assert run == own != other


def test_a_directory_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunDirectoryError, match="cannot be made: Not a directory"),
        claimed_run_dir(config(tmp_path / "file"), None),
    ):
        pass
