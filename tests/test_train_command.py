"""`dlrm-autoshard train`: one line where something is wrong, one sentence at Ctrl-C, nothing of the launcher's own."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dlrm_autoshard.commands.rank import check
from dlrm_autoshard.config import load_config
from tests.jobs import REPOSITORY, free_port, steps_saved, torchrun, until

CONFIG = """
data:
  source: synthetic
  train_samples: 20000
  test_samples: 1000
  tables:
    - {name: a, num_embeddings: 500}
    - {name: b, num_embeddings: 50, mean_pooling: 3.0}
train: {batch_size: 64, epochs: 2}
autoshard: {enabled: false}
profile: {enabled: false}
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
ENVIRONMENT.pop("OMP_NUM_THREADS", None)  # nobody sets it for the first run of their life


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(CONFIG + f"run: {{name: job, dir: {tmp_path / 'runs'}}}\n")
    return path


def dlrm(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlrm_autoshard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=ENVIRONMENT)


def test_it_trains_on_two_ranks_from_anywhere_and_says_nothing_but_what_training_says(
    config: Path, tmp_path: Path
) -> None:
    """Goes on on one; and where it is done, says so, and its result stays what it was."""
    chosen = ("data.val_samples=1000", "train.eval_every_steps=10", "checkpoint.keep_best=logloss")
    done = dlrm("train", "mine.yaml", "--ranks", "2", "train.max_steps=20", *chosen, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "on 2 rank(s), 20 steps" in done.stdout
    longer = ("train", "mine.yaml", "--resume", "train.max_steps=30", "--ranks=1", *chosen)
    resumed = dlrm(*longer, cwd=tmp_path)
    assert resumed.returncode == 0 and "resumed at step 20" in resumed.stdout, resumed.stderr
    path, metrics = tmp_path / "runs/job/result.json", tmp_path / "runs/job/metrics.jsonl"
    first, told = json.loads(path.read_text()), metrics.read_text()
    assert first["best"]["metric"] == "logloss" and first["best"]["step"] in (10, 20, 30)
    said = dlrm(*longer, cwd=tmp_path).stdout
    assert "resumed at step 30: nothing is left to do" in said and "loss 0.0000" not in said, said
    again = json.loads(path.read_text())
    del first["seconds"], again["seconds"]
    assert again == first and metrics.read_text() == told


WRONG = {
    "run.device=cuda": "run.device is 'cuda', but torch sees no GPU.",
    "callbacks=[tensorbord]": "callbacks: 'tensorbord' is none of tensorboard, wandb, mlflow, nor of the form",
    "model.factory=tower.py:Tower": "model.factory: there is no file 'tower.py'",
    "autoshard.pinned={a: 7}": "autoshard.pinned puts table 'a' on rank 7, but there are 2 ranks (0 to 1).",
    "checkpoint.keep_best=auc": "this data has no val samples",
    "run.dir=mine.yaml/runs": "run directory 'mine.yaml/runs' cannot be made: Not a directory.",
}
if Path("/dev/nvidia0").exists():
    del WRONG["run.device=cuda"]


def test_all_that_is_wrong_is_said_at_once_before_a_rank_runs(config: Path, tmp_path: Path) -> None:
    done = dlrm("train", "mine.yaml", "--ranks=2", *WRONG, cwd=tmp_path)
    assert done.returncode == 2 and "[rank" not in done.stderr and not done.stdout
    assert done.stderr.count("\n") == len(WRONG), done.stderr
    assert all(said in done.stderr for said in WRONG.values()), done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"mine.yaml"}


def test_ranks_that_torchrun_started_say_it_once(config: Path, tmp_path: Path) -> None:
    command = torchrun(2, "--config", str(config), "callbacks=[nothing]", "autoshard.exclude_ranks=[5]")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode != 0
    for said in ("callbacks: 'nothing' is none of", "autoshard.exclude_ranks names rank 5, but there are 2 ranks"):
        assert done.stderr.partition("Root Cause")[0].count(said) == 1, done.stderr


def test_more_ranks_than_cores_are_warned_of_before_they_start(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    check(load_config(config, ["run.device=cpu"]), ranks=3)
    assert capfd.readouterr().err == "3 ranks share 1 core and wait for each other: fewer ranks train faster.\n"


@pytest.mark.parametrize(
    ("arguments", "placement"),
    [
        (["--ranks=2"], "planned in [\\d.]+ s by 'auto'; tables may move while it trains"),
        (["--ranks=2", "autoshard.enabled=false"], r"round robin; tables stay there \(autoshard.enabled is false\)"),
        (["--ranks=1"], "one rank holds all tables"),
    ],
)
def test_the_start_says_how_tables_are_placed_and_whether_they_may_move(
    arguments: list[str], placement: str, config: Path, tmp_path: Path
) -> None:
    config.write_text(config.read_text().replace("autoshard: {enabled: false}\nprofile: {enabled: false}\n", ""))
    done = dlrm("train", "mine.yaml", "train.max_steps=9", *arguments, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert re.search(f"^placement: {placement}$", done.stdout, re.MULTILINE), done.stdout
    assert ("No table" in done.stdout) == ("may move" in placement), "9 steps are too few to decide by"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nobody.yaml"], "dlrm-autoshard train: there is no file 'nobody.yaml', and no config of that name. "),
        (["mine.yaml", "--ranks=2", "autoshard.memory_gib=0.00001"], "] rank 0 needs "),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], sentence: str, config: Path, tmp_path: Path) -> None:
    """Also where only the ranks can find it. test_mistakes.py has many more, in one process."""
    done = dlrm("train", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not list((tmp_path / "runs").glob("*/checkpoints"))


def test_two_machines_run_the_same_line(config: Path, tmp_path: Path) -> None:
    """Two launchers on this machine, each with one rank of the job; the second one comes later."""
    head = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "dlrm_autoshard", "train", str(config), "--nodes=2", "--ranks=1"]
    command += [f"--head={head}", "--job=two-machines", "train.max_steps=20"]
    environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}
    machines = []
    try:
        for _ in range(2):
            machines.append(subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment, cwd=tmp_path))
            time.sleep(2)
        said = [machine.communicate(timeout=120) for machine in machines]
    finally:
        for machine in machines:
            machine.terminate()
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert sorted("on 2 rank(s), 20 steps" in out for out, _ in said) == [False, True], said
    assert not any(error for _, error in said), said
    assert json.loads((tmp_path / "runs/job/result.json").read_text())["plan"]["world_size"] == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_lost_terminals_hangups_end_a_job_with_a_checkpoint_of_its_last_step(
    ranks: int, config: Path, tmp_path: Path
) -> None:
    """The kernel, the shell and the launcher each send one; and nothing can be written to the terminal any more."""
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "dlrm_autoshard", "train", str(config), f"--ranks={ranks}"]
    with (tmp_path / "said").open("w") as said:
        job = subprocess.Popen(
            [*command, "checkpoint.every_steps=100", "train.epochs=50", "checkpoint.asynchronous=false"],
            stdin=end, stdout=end, stderr=said, env=ENVIRONMENT, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
        )  # fmt: skip
    os.close(end)
    try:
        until(lambda: steps_saved(tmp_path / "runs/job")[-1:] >= [100])
        os.close(terminal)
        for _ in range(3):
            os.killpg(job.pid, signal.SIGHUP)
            time.sleep(0.02)
        job.wait(60)
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGHUP
    last = steps_saved(tmp_path / "runs/job")[-1]
    assert last % 100, "its last step, and not one of those at which checkpoints are due"
    assert f"stopped by SIGHUP after step {last}. --resume continues" in (tmp_path / "said").read_text()


def test_nohup_is_obeyed(config: Path, tmp_path: Path) -> None:
    for ranks in (1, 2):
        command = ["nohup", sys.executable, "-m", "dlrm_autoshard", "train", str(config), f"--ranks={ranks}"]
        steps = "train.max_steps=250"
        job = subprocess.Popen(
            [*command, "checkpoint.every_steps=50", steps, f"run.name=job{ranks}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=ENVIRONMENT, start_new_session=True,
        )  # fmt: skip
        try:
            until((tmp_path / f"runs/job{ranks}/checkpoints/step_00000050").exists)
            os.killpg(job.pid, signal.SIGHUP)
            assert job.wait(60) == 0
        finally:
            job.kill()


def output(where: str) -> int:
    """A file descriptor that nothing can be written to."""
    if where == "a full disk":
        return os.open("/dev/full", os.O_WRONLY)
    end, there = os.pipe() if where == "a pipe without a reader" else pty.openpty()
    os.close(end)
    return there


NOWHERE = [("a full disk", 1), ("a pipe without a reader", 2), ("a terminal that is gone", 1), ("closed", 2)]


@pytest.mark.parametrize(("where", "ranks"), NOWHERE)
def test_output_is_no_condition_of_training(where: str, ranks: int, config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dlrm_autoshard", "train", str(config), f"--ranks={ranks}"]
    command += ["train.max_steps=20", "train.log_every_steps=1"]
    if where == "closed":
        done = subprocess.run(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", *command], timeout=90, env=ENVIRONMENT)
    else:
        there = output(where)
        done = subprocess.run(command, stdout=there, stderr=there, timeout=90, env=ENVIRONMENT)
        os.close(there)
    assert done.returncode == 0
    assert json.loads((tmp_path / "runs/job/result.json").read_text())["steps"] == 20


@pytest.mark.slow
@pytest.mark.parametrize(("where", "ranks"), [(where, 3 - ranks) for where, ranks in NOWHERE])
def test_nor_is_it_on_the_other_number_of_ranks(where: str, ranks: int, config: Path, tmp_path: Path) -> None:
    test_output_is_no_condition_of_training(where, ranks, config, tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_in_one_sentence(ranks: int, config: Path, tmp_path: Path) -> None:
    """As a terminal sends it: to every process of the foreground group."""
    command = [sys.executable, "-m", "dlrm_autoshard", "train", str(config), f"--ranks={ranks}", "--job=nightly"]
    job = subprocess.Popen(
        [*command, "checkpoint.every_steps=50", "train.epochs=50"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True,
    )  # fmt: skip
    try:
        until((tmp_path / "runs/job/checkpoints/step_00000050").exists)
        family = psutil.Process(job.pid).children(recursive=True)
        os.killpg(job.pid, signal.SIGINT)
        said = job.communicate(timeout=60)[1]
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGINT
    assert said.count("\n") == 1 and "stopped by SIGINT after step " in said and "--resume continues from" in said
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    assert json.loads((tmp_path / "runs/job/job.json").read_text())["job"] == ["id nightly"]


@pytest.mark.parametrize("broken", ["altair does not import", "PYTHONOPTIMIZE=2", "the page is not drawn"])
def test_a_page_that_cannot_be_drawn_is_a_sentence_after_the_result(broken: str, config: Path, tmp_path: Path) -> None:
    environment = dict(ENVIRONMENT)
    if broken == "PYTHONOPTIMIZE=2":
        environment["PYTHONOPTIMIZE"] = "2"
    elif broken == "altair does not import":
        (tmp_path / "altair.py").write_text("raise TypeError('another version of something')\n")
        environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    else:
        spoil = "import dlrm_autoshard.report.html as page\ndef draw(*given): raise IndexError('a bug')\n"
        (tmp_path / "late.py").write_text(spoil + "page.write_html = draw\n")
    command = [sys.executable, "-m", "dlrm_autoshard", "train", str(config), "--ranks=1", "train.max_steps=20"]
    if broken == "the page is not drawn":
        start = "import sys, late\nfrom dlrm_autoshard.commands.main import main\nsys.exit(main(sys.argv[1:]))"
        command[1:3] = ["-c", start]
        environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no report.html: " in done.stdout and "Traceback" not in done.stdout
    assert json.loads((tmp_path / "runs/job/result.json").read_text())["steps"] == 20
    if broken != "the page is not drawn":
        command[3:] = ["report", str(tmp_path / "runs/job"), "--html"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=tmp_path, env=environment)
        assert asked.returncode == 2 and asked.stderr.count("\n") == 1 and "altair" in asked.stderr


def test_a_rank_that_is_killed_is_named_in_a_sentence(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dlrm_autoshard", "train", str(config), "--ranks=2", "train.epochs=50"]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        until((tmp_path / "runs/job/metrics.jsonl").exists)
        next(p for p in psutil.Process(job.pid).children() if p.environ().get("RANK") == "1").kill()
        said = job.communicate(timeout=60)[1]
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGKILL
    assert said.splitlines()[-1].startswith("rank 1 was ended by SIGKILL"), said
    assert "Traceback" not in said


def test_one_rank_that_is_killed_is_started_again_where_restarts_are_asked_for(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dlrm_autoshard", "train", str(config), "--ranks=1", "--restarts=1"]
    command += ["train.epochs=50", "train.max_steps=1000", "checkpoint.every_steps=100"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        until((tmp_path / "runs/job/checkpoints/step_00000100").exists)
        ranks = [p for p in psutil.Process(job.pid).children() if p.environ().get("RANK") == "0"]
        (ranks or [job])[0].kill()
        said, error = job.communicate(timeout=90)
    finally:
        job.kill()
    assert job.returncode == 0 and "resumed at step " in said, error


def test_the_shipped_configs_are_listed_and_copied(tmp_path: Path) -> None:
    listed = dlrm("configs", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in listed] == sorted(path.stem for path in (REPOSITORY / "configs").glob("*.yaml"))
    assert max(map(len, listed)) < 80
    assert dlrm("configs", "debug_cpu", cwd=tmp_path).returncode == 0
    assert (tmp_path / "debug_cpu.yaml").read_text() == (REPOSITORY / "configs/debug_cpu.yaml").read_text()
    again = dlrm("configs", "debug_cpu", cwd=tmp_path)
    assert again.returncode == 2 and "exists already" in again.stderr
    unknown = dlrm("configs", "nobody", cwd=tmp_path)
    assert unknown.returncode == 2 and "The package has criteo_kaggle, " in unknown.stderr


def test_the_version_is_the_packages(tmp_path: Path) -> None:
    import dlrm_autoshard

    assert dlrm("--version", cwd=tmp_path).stdout.strip() == f"dlrm-autoshard {dlrm_autoshard.__version__}"
    assert json.dumps(dlrm_autoshard.__version__) in (REPOSITORY / "dlrm_autoshard/__init__.py").read_text()


COUNTED = """
import sys
from dlrm_autoshard.data import open as sources
opened, kind = [], sources.SyntheticSource
sources.SyntheticSource = lambda *given: opened.append(given) or kind(*given)
from dlrm_autoshard.commands.main import main
try:
    main()
finally:
    print(f"opened {len(opened)}", file=sys.stderr)
"""


def test_one_process_opens_its_data_once(config: Path, tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", COUNTED, "train", "mine.yaml", "--ranks", "1", "train.max_steps=2"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, env=ENVIRONMENT,
    )  # fmt: skip
    assert told.stderr == "opened 1\n", told.stderr
