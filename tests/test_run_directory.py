"""A run's directory is one job's alone; every start's config is kept."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrm_autoshard.config import Config, ConfigError, parse_config
from dlrm_autoshard.training.checkpoints.folder import run_and_checkpoint
from dlrm_autoshard.training.run_directory import (
    RunDirectoryError,
    changes_since_last_start,
    claimed_run_dir,
    job_of_this_process,
    point_latest_at,
    record_start,
    run_that_obeyed,
    write_job,
)

ONE, OTHER = frozenset({"id one"}), frozenset({"id other"})


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
    latest = tmp_path / "latest"
    assert run_and_checkpoint(f"{latest}/checkpoints/step_00000001") == (
        str(run), run / "checkpoints" / "step_00000001",
    )  # fmt: skip
    with claimed_run_dir(config(tmp_path), str(latest)) as linked:
        record_start(linked, config(tmp_path, epochs=4), 3)
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["epochs"] == 4
    assert json.loads((run / "environment.json").read_text())["world_size"] == 3
    earlier = run / "starts" / "1970-01-01T00-00-00Z"
    assert yaml.safe_load((earlier / "config.yaml").read_text())["train"]["epochs"] == 2
    assert json.loads((earlier / "environment.json").read_text())["world_size"] == 2
    assert changes_since_last_start(run) == ["train.epochs 2 -> 4"]
    assert (tmp_path / "latest").resolve() == run, "a run continued through the link does not bend the link"


def test_a_job_that_starts_again_continues_its_own_run_and_no_others(tmp_path: Path) -> None:
    with claimed_run_dir(config(tmp_path), None, ONE) as own:
        record_start(own, config(tmp_path), 1)
        finish(own)
    with claimed_run_dir(config(tmp_path), None, OTHER) as other:
        record_start(other, config(tmp_path), 1)
        finish(other)
    with claimed_run_dir(config(tmp_path), None, ONE) as run:
        assert run == own != other
    with claimed_run_dir(config(tmp_path), None) as run:  # of no job that is known
        assert run not in (own, other)


def test_a_job_that_starts_again_is_told_from_one_that_is_to_resume(tmp_path: Path) -> None:
    """Each start has the same --resume on its command line; later it might name another run, or what is gone."""
    with claimed_run_dir(config(tmp_path), None, OTHER) as run:
        finish(run)
    for resume, asked in (("", ""), (str(tmp_path / "latest"), str(tmp_path / "latest")), (str(run), str(run))):
        point_latest_at(run)
        with claimed_run_dir(config(tmp_path), asked, ONE) as resumed:
            assert resumed == run, "not the link to it, which the next start bends"
            assert run_that_obeyed(config(tmp_path), asked, resume, ONE) is None  # killed before it has
            write_job(resumed, ONE, resume)
        with claimed_run_dir(config(tmp_path), None, frozenset({"id third"})) as newer:
            finish(newer)
            point_latest_at(newer)
        assert run_that_obeyed(config(tmp_path), asked, resume, ONE) == run
        assert run_that_obeyed(config(tmp_path), asked, resume, OTHER) is None
        assert run_that_obeyed(config(tmp_path), asked, "elsewhere", ONE) is None
        shutil.rmtree(newer)


def test_a_run_whose_name_ends_in_a_number_is_not_taken_for_another_names(tmp_path: Path) -> None:
    second = config(tmp_path).model_copy(update={"run": config(tmp_path).run.model_copy(update={"name": "job-2"})})
    runs = []
    for made_with in (config(tmp_path), second):
        with claimed_run_dir(made_with, None) as run:
            record_start(run, made_with, 1)
            finish(run)
            runs.append(run)
    assert [run.name for run in runs] == ["job", "job-2"]
    for made_with, run in zip((config(tmp_path), second), runs, strict=True):
        with claimed_run_dir(made_with, "") as found:
            assert found == run


def test_a_run_that_another_job_could_not_start_in_stays_its_own_jobs(tmp_path: Path) -> None:
    with claimed_run_dir(config(tmp_path), None, ONE) as run:
        finish(run)
    with pytest.raises(KeyboardInterrupt), claimed_run_dir(config(tmp_path), str(run), OTHER):
        raise KeyboardInterrupt  # or: another model's checkpoint
    with claimed_run_dir(config(tmp_path), None, ONE) as again:
        assert again == run


@pytest.mark.parametrize("left", ["", "step_00000010.tmp", "step_00000010.set_aside"])
def test_a_run_without_a_whole_checkpoint_is_not_resumed(left: str, tmp_path: Path) -> None:
    with claimed_run_dir(config(tmp_path), None) as run:
        (run / "checkpoints" / left).mkdir(parents=True)
    for resume, says in ((str(run), f"'{run}' has no checkpoint to resume from"), ("", "there is no run 'job' with a")):
        with pytest.raises(RunDirectoryError, match=says), claimed_run_dir(config(tmp_path), resume):
            pass


def test_of_a_job_without_an_id_any_torchrun_that_is_left_is_enough(tmp_path: Path) -> None:
    with claimed_run_dir(config(tmp_path), None, {"torchrun a", "torchrun b"}) as run:
        finish(run)
    with claimed_run_dir(config(tmp_path), None, {"torchrun b", "torchrun c"}) as again:  # a's machine was replaced
        assert again == run
    with claimed_run_dir(config(tmp_path), None, {"torchrun c"}) as again:
        assert again == run


def test_the_id_is_torchruns_unless_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert job_of_this_process() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "77")
    assert job_of_this_process() == "id 77"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # what torchrun says where it was given none: every such job's
    assert f"torchrun process {os.getppid()} started" in str(job_of_this_process())


def test_gaps_in_the_numbers_hide_no_run(tmp_path: Path) -> None:
    runs = []
    for job in (ONE, OTHER, frozenset({"id third"})):
        with claimed_run_dir(config(tmp_path), None, job) as run:
            finish(run)
        runs.append(run)
    shutil.rmtree(runs[0])
    with claimed_run_dir(config(tmp_path), None, OTHER) as run:
        assert run == runs[1]
    shutil.rmtree(runs[1])
    with claimed_run_dir(config(tmp_path), "") as run:
        assert run == runs[2] == tmp_path / "job-3"
    with claimed_run_dir(config(tmp_path), None) as run:
        assert run == tmp_path / "job-4", "a number that was given once would look older than it is"


def record_start_and_die(folder: Path, after: int) -> None:
    """Killed at the n-th file that record_start puts in its place."""
    left, replace = after, Path.replace

    def counted(self: Path, target: Any) -> Path:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return replace(self, target)

    with claimed_run_dir(config(folder), None, ONE) as run:
        Path.replace = counted  # type: ignore[method-assign, assignment]
        record_start(run, config(folder, epochs=3), 2)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_kill_inside_record_start_loses_neither_the_run_nor_its_config(after: int, tmp_path: Path) -> None:
    with claimed_run_dir(config(tmp_path), None, ONE) as run:
        record_start(run, config(tmp_path, epochs=2), 2)
        finish(run)
    killed = multiprocessing.get_context("fork").Process(target=record_start_and_die, args=(tmp_path, after))
    killed.start()
    killed.join(30)
    assert killed.exitcode == -signal.SIGKILL
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["epochs"] == (3 if after else 2)
    with claimed_run_dir(config(tmp_path), None, ONE) as again:
        record_start(again, config(tmp_path, epochs=4), 2)
    assert again == run
    assert not [path for path in tmp_path.rglob(".*") if path.name.endswith(".new")]
    assert len(list((run / "starts").rglob("environment.json"))) >= 1


def test_a_job_waits_for_the_last_ranks_of_its_earlier_start(tmp_path: Path) -> None:
    earlier = claimed_run_dir(config(tmp_path), None, ONE)
    finish(earlier.__enter__())
    threading.Timer(0.5, lambda: earlier.__exit__(None, None, None)).start()
    started = time.monotonic()
    with claimed_run_dir(config(tmp_path), None, ONE) as run:
        assert run == tmp_path / "job" and time.monotonic() - started > 0.3


@pytest.mark.parametrize("name", ["", ".", "..", "../../x", "/abs", "a/b", "latest", ".hidden", "a\x1b[31m", "a\n"])
def test_a_name_that_is_no_folder_of_its_own_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'run.name' is .*; it must be the name of one folder in run.dir"):
        parse_config({**config(tmp_path).model_dump(), "run": {"name": name, "dir": str(tmp_path)}})


@pytest.mark.parametrize("name", [".lock", "job.json", "plan/step_00000000.json", "costs", "metrics.jsonl"])
def test_nothing_is_written_through_a_link_inside_a_run(name: str, tmp_path: Path) -> None:
    with claimed_run_dir(config(tmp_path / "runs"), None, ONE) as run:
        finish(run)
    (tmp_path / "precious").write_text("kept")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "precious")
    with (
        pytest.raises(RunDirectoryError, match=rf"{name}' is a symbolic link to '.*precious', .* Remove it"),
        claimed_run_dir(config(tmp_path / "runs"), "", ONE),
    ):
        pass
    with claimed_run_dir(config(tmp_path / "runs"), None, OTHER):
        pass
    assert (tmp_path / "precious").read_text() == "kept"


def test_links_that_weights_and_biases_makes_are_no_obstacle(tmp_path: Path) -> None:
    with claimed_run_dir(config(tmp_path), None) as run:
        finish(run)
        (run / "wandb").mkdir()
        (run / "wandb" / "latest-run").symlink_to("run-1")
    with claimed_run_dir(config(tmp_path), "") as again:
        assert again == run


def test_checkpoints_may_lie_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "large_disk" / "step_00000010").mkdir(parents=True)
    (tmp_path / "runs" / "job").mkdir(parents=True)
    (tmp_path / "runs" / "job" / "checkpoints").symlink_to(tmp_path / "large_disk")
    with claimed_run_dir(config(tmp_path / "runs"), "") as run:
        assert run.name == "job"


def point_often(run: Path, times: int) -> None:
    for _ in range(times):
        point_latest_at(run)


def test_latest_survives_any_number_of_starts_at_once(tmp_path: Path) -> None:
    runs = [tmp_path / f"run-{number}" for number in range(4)]
    starts = [multiprocessing.get_context("fork").Process(target=point_often, args=(run, 200)) for run in runs]
    for start in starts:
        start.start()
    for start in starts:
        start.join(60)
    assert [start.exitcode for start in starts] == [0] * 4
    assert (tmp_path / "latest").readlink() in {Path(run.name) for run in runs}
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_a_folder_in_the_place_of_the_link_to_the_newest_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()  # as copies of runs have it that follow links
    with pytest.raises(RunDirectoryError, match="latest' is a folder"), claimed_run_dir(config(tmp_path), None) as run:
        record_start(run, config(tmp_path), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "latest"]


def test_a_directory_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunDirectoryError, match="cannot be made: Not a directory"),
        claimed_run_dir(config(tmp_path / "file"), None),
    ):
        pass
