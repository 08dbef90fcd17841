"""Jobs started as people start them, by torchrun and scripts: errors are sentences, a killed rank comes back."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from dlrm_autoshard.config import parse_config
from dlrm_autoshard.distributed.ranks.launch import launch
from dlrm_autoshard.errors import UserError
from tests.jobs import CONFIG, REPOSITORY, TRAIN, free_port, started, steps_saved, torchrun, until
from tests.ranks import run_ranks
from tests.trainers import make_runtime, trainer


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG + f"run: {{name: job, dir: {tmp_path / 'runs'}}}\n")
    return path


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY, env=settings)


def metrics(run_dir: Path, split: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


# Training -----------------------------------------------------------------------------------------------------------


def test_overrides_may_stand_anywhere_also_after_resume(config: Path, tmp_path: Path) -> None:
    """Without torchrun: one process trains alone."""
    assert run([sys.executable, TRAIN, "train.max_steps=10", "--config", str(config)]).returncode == 0
    resumed = run([sys.executable, TRAIN, "--config", str(config), "--resume", "train.max_steps=20"])
    assert resumed.returncode == 0, resumed.stderr
    assert [line["step"] for line in metrics(tmp_path / "runs" / "job", "test")][-1] == 20
    assert not (tmp_path / "runs" / "job-2").exists()


def test_damaged_records_block_no_resume(config: Path, tmp_path: Path) -> None:
    assert run([sys.executable, TRAIN, "--config", str(config), "train.max_steps=10"]).returncode == 0
    records = [
        tmp_path / "runs/job" / name for name in ("metrics.jsonl", "costs/epochs.jsonl", "costs/rank_00000.jsonl")
    ]
    for path in records:
        path.write_bytes(b"\0\0\0\n[1]\n" + path.read_bytes() + b'{"schema":1,"step":null,"end_step":1e999}\n')
    done = run([sys.executable, TRAIN, "--config", str(config), "--resume", "train.max_steps=20"])
    assert done.returncode == 0, done.stderr
    for path in records:
        assert f"'{path}' is damaged: 3 lines, the first line 1 moved to '{path}.damaged'" in done.stdout
    assert json.loads((tmp_path / "runs/job/result.json").read_text())["steps"] == 20


def command(ranks: int, *arguments: str, restarts: int = 0) -> list[str]:
    """One rank needs no torchrun."""
    return torchrun(ranks, *arguments, restarts=restarts) if ranks > 1 else [sys.executable, TRAIN, *arguments]


def undisturbed(rank: int, world_size: int, run_dir: Path) -> None:
    with trainer(parse_config(yaml.safe_load(CONFIG)), make_runtime(rank, world_size), run_dir) as made:
        made.run()


def end_of_an_undisturbed_job(ranks: int, tmp_path: Path) -> dict[str, Any]:
    """Which nobody starts anew, or stops."""
    run_ranks(undisturbed, ranks, tmp_path / "undisturbed", timeout=90)
    return metrics(tmp_path / "undisturbed", "test")[-1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_job_ends_with_a_checkpoint_of_its_last_step_and_resumes_as_if_never_stopped(
    ranks: int, config: Path, tmp_path: Path
) -> None:
    """SIGTERM to torchrun, as schedulers send it; without torchrun, Ctrl-C."""
    number = signal.SIGTERM if ranks == 2 else signal.SIGINT
    settings = ("--config", str(config), "checkpoint.every_steps=100")
    with started(command(ranks, *settings), tmp_path) as job:
        until(lambda: (tmp_path / "runs/job/checkpoints/step_00000100").exists())
        job.process.send_signal(number)
        assert job.ends_within(60) != 0
        output = job.said()
    last = steps_saved(tmp_path / "runs/job")[-1]
    assert output.count(f"stopped by {number.name} after step {last}. --resume continues") == 1 and last > 100, output
    assert "launch/train.py" not in output.replace(TRAIN, ""), "no traceback of ours"
    assert run(command(ranks, *settings, "--resume")).returncode == 0
    assert metrics(tmp_path / "runs/job", "test")[-1] == end_of_an_undisturbed_job(ranks, tmp_path)


def test_a_job_stopped_before_training_says_so(config: Path, tmp_path: Path) -> None:
    with started([sys.executable, TRAIN, "--config", str(config)], tmp_path) as job:
        until(lambda: psutil.Process(job.process.pid).cpu_times().user > 0.3)
        job.process.send_signal(signal.SIGINT)
        assert job.ends_within(60) == 128 + signal.SIGINT
        assert job.said() in ("stopped.\n", "stopped by SIGINT before training began.\n")
    assert not (tmp_path / "runs").exists()


def test_a_killed_rank_comes_back_and_training_ends_as_if_nothing_had_happened(config: Path, tmp_path: Path) -> None:
    with started(command(2, "--config", str(config), "checkpoint.every_steps=50", restarts=1), tmp_path) as job:
        until(lambda: steps_saved(tmp_path / "runs/job")[-1:] >= [100])
        job.ranks()[1].kill()
        assert job.ends_within(90) == 0, job.said()
        output = job.said()
    assert f"exitcode: -{int(signal.SIGKILL)}" in output and "resumed at step" in output
    assert not (tmp_path / "runs" / "job-2").exists()
    assert metrics(tmp_path / "runs/job", "test")[-1] == end_of_an_undisturbed_job(2, tmp_path)


def test_a_run_directory_that_is_renamed_meanwhile_is_made_again_as_one_that_can_be_continued(
    config: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "runs/job"
    settings = ("--config", str(config), "checkpoint.every_steps=100", "train.epochs=50")
    with started([sys.executable, TRAIN, *settings], tmp_path) as job:
        until(lambda: steps_saved(run_dir)[-1:] >= [100])
        run_dir.rename(tmp_path / "runs/moved")
        until(lambda: steps_saved(run_dir)[-1:] >= [300])
        job.process.send_signal(signal.SIGTERM)
        assert job.ends_within(60) == 128 + signal.SIGTERM
        said = job.said()
    assert said.count(f"'{run_dir}' was renamed or removed while this job was writing to it.") == 1
    last = steps_saved(run_dir)[-1]
    assert {"config.yaml", "environment.json", "job.json"} <= {path.name for path in run_dir.iterdir()}
    more = run([sys.executable, TRAIN, *settings, "--resume", f"train.max_steps={last + 5}"])
    assert more.returncode == 0 and f"resumed at step {last}" in more.stdout, more.stderr


# What goes wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.batchsize=3", "unknown key 'train.batchsize'. Did you mean 'train.batch_size'?"),
        ("autoshard.placement=nowhere.json", "plan file 'nowhere.json' cannot be read: No such file or directory."),
    ],
)
def test_what_all_ranks_find_is_said_once_with_a_rank_and_closes_torchruns_summary(
    override: str, sentence: str, config: Path
) -> None:
    done = run(torchrun(2, "--config", str(config), override))
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if sentence in line and line.startswith("[rank ")]
    assert len(said) == 1, done.stderr
    assert sentence in done.stderr.rsplit("Root Cause", 1)[1]
    assert f"{REPOSITORY}/dlrm_autoshard" not in done.stderr, "no traceback of ours"


def test_without_torchrun_the_sentence_is_all(config: Path) -> None:
    done = run([sys.executable, TRAIN, "--config", str(config), "run.device=gpu"])
    assert done.returncode == 2
    assert done.stderr == f"{config}: 'run.device' is 'gpu'; it must be one of auto, cpu, cuda. Did you mean 'cuda'?\n"


def test_a_bug_keeps_its_traceback(config: Path, tmp_path: Path) -> None:
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
        "import dlrm_autoshard.config as c\ndef explode(self): raise ValueError('a bug')\nc.Config.to_yaml = explode\n"
    )
    done = run([sys.executable, TRAIN, "--config", str(config)], PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "ValueError: a bug" in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("only root may mount one")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


FAILS_ON_A_FULL_DISK = """
import os, pathlib, sys
from dlrm_autoshard.distributed.ranks.launch import complain, recorded
open({count!r}, "a").write("x")
with open({disk!r} + "/filler", "ab", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
def fail():
    raise RuntimeError("a bug")
if {bug}:
    recorded(fail)()
complain("no space is left")
sys.exit(2)
"""


@pytest.mark.parametrize("bug", [False, True])
def test_a_full_disk_that_holds_temporary_files_costs_neither_the_sentence_nor_restarts(
    bug: bool, small_disk: Path, tmp_path: Path
) -> None:
    fails = FAILS_ON_A_FULL_DISK.format(count=str(tmp_path / "count"), disk=str(small_disk), bug=bug)
    launcher = "import sys; from dlrm_autoshard.distributed.ranks.launch import launch\n"
    launcher += f"sys.exit(launch(['-c', {fails!r}], 1, restarts=1))"
    done = run([sys.executable, "-c", launcher], TMPDIR=str(small_disk), PYTHONPATH=str(REPOSITORY))
    assert (tmp_path / "count").read_text() == "xx", done.stderr
    if bug:
        assert done.returncode == 1 and done.stderr.count("Traceback") == 2, "one of the bug at each start"
    else:
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "[rank 0] no space is left\n" in done.stderr


# Scripts ------------------------------------------------------------------------------------------------------------


def use_env(repository: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(["bash", "-c", f"set -euo pipefail; cd '{repository}'; . launch/env.sh; use_env '' cpu"], **environment)


@pytest.mark.parametrize("script", [*sorted((REPOSITORY / "launch").glob("*.s*")), REPOSITORY / ".ci" / "run"], ids=str)
def test_the_scripts_are_bash(script: Path) -> None:
    assert run(["bash", "-n", str(script)]).returncode == 0


def test_a_missing_python_a_foreign_folder_and_a_missing_network_are_sentences(tmp_path: Path) -> None:
    no_python = use_env(REPOSITORY, DLRM_PYTHON="/no/python", DLRM_VENV=str(tmp_path / "a"))
    assert no_python.returncode == 1
    assert no_python.stderr.strip() == "DLRM_PYTHON is '/no/python', which is no working Python 3.10 to 3.14."

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "precious").touch()
    foreign = use_env(REPOSITORY, DLRM_VENV=str(tmp_path / "b"))
    assert foreign.returncode == 1 and "this script did not make it" in foreign.stderr
    assert (tmp_path / "b" / "precious").exists()

    nowhere = "http://nowhere.invalid/simple"
    offline = use_env(
        REPOSITORY,
        DLRM_PYTHON=sys.executable,
        DLRM_VENV=str(tmp_path / "c"),
        DLRM_TORCH_INDEX=nowhere,
        PIP_INDEX_URL=nowhere,
        PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="",
        PIP_CONFIG_FILE="/dev/null",
        PIP_NO_CACHE_DIR="1",
    )
    assert offline.returncode == 1 and "pip could not reach a package index." in offline.stderr


def clone_with_a_stand_in_for_pip(tmp_path: Path) -> Path:
    """A repository with an environment whose pip only writes its calls to tmp_path/calls."""
    copy = tmp_path / "copy"
    (copy / "launch").mkdir(parents=True)
    shutil.copy(REPOSITORY / "setup.py", copy)
    shutil.copy(REPOSITORY / "launch" / "env.sh", copy / "launch")
    python = copy / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = pip ]; then echo "$@" >>"{tmp_path}/calls"; else "{sys.executable}" "$@"; fi\n'
    )
    python.chmod(0o755)
    (copy / ".venv" / ".variant").write_text("cpu\n")
    (python.parent / "activate").touch()
    return copy


def test_the_torch_is_the_newest_or_the_one_that_the_environment_has_or_dlrm_torch_names(tmp_path: Path) -> None:
    copy = clone_with_a_stand_in_for_pip(tmp_path)

    def asked(variant: str, **environment: str) -> str:
        (copy / ".venv" / ".variant").write_text(variant + "\n")
        assert use_env(copy, DLRM_TORCH_INDEX="none", **environment).returncode == 0
        return (tmp_path / "calls").read_text().splitlines()[-1]

    assert asked("cpu").endswith("-e .[cpu]")
    assert asked("cpu-2.13").endswith("-e .[cpu-2.13]")
    assert asked("cpu-2.14", DLRM_TORCH="2.14").endswith("-e .[cpu-2.14]")
    unknown = use_env(copy, DLRM_TORCH="2.12")
    assert unknown.returncode == 1 and "DLRM_TORCH is '2.12', but setup.py has no fbgemm for it." in unknown.stderr


def test_the_environment_is_made_once(tmp_path: Path) -> None:
    """pip is called when setup.py has changed, and only then."""
    copy = clone_with_a_stand_in_for_pip(tmp_path)

    def calls() -> int:
        assert use_env(copy, DLRM_TORCH_INDEX="none").returncode == 0
        return len((tmp_path / "calls").read_text().splitlines())

    assert [calls(), calls()] == [1, 1]
    with (copy / "setup.py").open("a") as setup:
        setup.write("# changed\n")
    assert [calls(), calls()] == [2, 2]


def test_a_job_that_is_named_goes_on_under_its_name_and_one_that_is_not_is_new(config: Path, tmp_path: Path) -> None:
    """Without a rank that died, and without --resume: as a scheduler starts a job again."""

    def starter(ranks: int, steps: int, **environment: str) -> str:
        command = ["bash", "launch/single_node.sh", str(ranks), str(config), f"train.max_steps={steps}"]
        done = run(command, PATH=path_with_this_python(), **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    starter(2, 5, JOB_ID="mine")
    assert metrics(tmp_path / "runs" / "job", "test")[-1]["step"] == 5
    assert "resumed at step 5" in starter(1, 8, JOB_ID="mine")
    assert "resumed" not in starter(1, 5)
    assert (tmp_path / "runs" / "job-2").exists() and not (tmp_path / "runs" / "job-3").exists()


def test_the_starter_runs_from_any_folder_in_the_quickstarts_environment(config: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "DLRM_VENV": sys.prefix}
    command = ["bash", str(REPOSITORY / "launch/single_node.sh"), "1", config.name, "train.max_steps=3", "run.dir=own"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "own" / "job", "test")[-1]["step"] == 3


@pytest.mark.parametrize("error", [RendezvousConnectionError, RendezvousTimeoutError])
def test_machines_that_do_not_find_each_other_are_a_sentence(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody_there(*_: object) -> None:
        raise error("The connection to the C10d store has failed. See inner exception for details.")

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: nobody_there)
    with pytest.raises(UserError, match=r"the machines did not find each other .* waited for 2, at --head node0:29400"):
        launch(["-c", ""], 1, nodes=2, head="node0:29400", job="ads")


def test_two_machines_find_each_other(config: Path, tmp_path: Path) -> None:
    """Two torchrun agents on this machine, one rank each, through the multi-node starter."""
    head = f"127.0.0.1:{free_port()}"
    environment = {"NNODES": "2", "RANKS_PER_NODE": "1", "HEAD": head, "MAX_RESTARTS": "0", "GLOO_SOCKET_IFNAME": "lo"}
    command = ["bash", "launch/multi_node.sh", str(config), "train.max_steps=5", "run.pin_cores=false"]
    environment["PATH"] = path_with_this_python()
    with started(command, tmp_path, **environment) as one, started(command, tmp_path, **environment) as other:
        for node in (one, other):
            assert node.ends_within(90) == 0, node.said()
        assert "on 2 rank(s)" in one.said() + other.said()
    assert metrics(tmp_path / "runs" / "job", "test")[-1]["step"] == 5


def path_with_this_python() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
