"""The commands on the pages work, in their order: the README's in an environment with the wheel and nothing else."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from dlrm_autoshard.commands.main import main
from tests.pages import PAGES, REPOSITORY, blocks
from tests.wheels import bare, build_wheel, install_beside_our_packages


def commands(page: str) -> list[str]:
    lines = (line for block in blocks(page, "bash") for line in block.splitlines() if line.strip())
    return [line.partition("  #")[0].strip() for line in lines]


ELSEWHERE = {
    "pip install": "test_wheel.py, in a bare environment",
    "NNODES=2 RANKS_PER_NODE=4": "test_launch.py, two agents on one machine",
    "dlrm-autoshard train mine.yaml --nodes": "test_train_command.py, two launchers on one machine",
    "torchrun --nnodes=2": "test_network.py, four ranks on two hosts",
    "dlrm-autoshard bench gpu-all": "test_gpu_ready.py, which learns that there is no GPU",
    "dlrm-autoshard train movielens": "as the quickstart trains it",
    "dlrm-autoshard plan --from-torchrec": "test_torchrec_module_file.py, of a module that it saves",
    "bash launch/test.sh": "by whoever runs this",
    "sbatch --nodes=2": "nowhere: it needs SLURM; test_launch.py checks that it is bash",
    "docker": "nowhere: it needs Docker",
}
SLOW = ["dlrm-autoshard train demo --ranks 2", "bash launch/quickstart.sh"]
TORCHRUN = "OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 launch/train.py --config configs/debug_cpu.yaml"
QUICK = {
    page: [
        line
        for line in commands(page)
        if line not in SLOW and not line.startswith(tuple(ELSEWHERE)) and not (line == TORCHRUN and page != "README.md")
    ]
    for page in PAGES
}


def test_every_command_is_run_by_some_test() -> None:
    assert TORCHRUN in QUICK["README.md"] and set(SLOW) <= set(commands("README.md"))
    lines = [line for page in PAGES for line in QUICK[page]]
    assert not [line for line in lines if line != TORCHRUN and not line.startswith(("dlrm-autoshard ", "printf "))]


@pytest.fixture(scope="module")
def with_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands of launch/README.md have trained."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("launch", "configs"):
        shutil.copytree(REPOSITORY / name, folder / name)
    run_here("launch/README.md", folder)
    return folder


def run_here(page: str, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in QUICK[page]:
            assert main(shlex.split(line)[1:]) == 0, line


@pytest.mark.parametrize(
    "page", [page for page in PAGES if QUICK[page] and page not in ("README.md", "launch/README.md")]
)
def test_a_pages_commands_work_in_their_order(page: str, with_a_run: Path) -> None:
    run_here(page, with_a_run)


def shell(command: str, folder: Path, programs: Path | None = None, limit: float = 280) -> str:
    path = f"{programs}{os.pathsep}{os.environ['PATH']}" if programs else os.environ["PATH"]
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**bare(), "PATH": path}, capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of an environment with the wheel, and nothing else of this repository."""
    folder = tmp_path_factory.mktemp("environment")
    programs = install_beside_our_packages(build_wheel(folder), folder / "env")
    (programs / "torchrun").write_text(f'#!/bin/sh\nexec "{programs}/python" -m torch.distributed.run "$@"\n')
    (programs / "torchrun").chmod(0o755)
    return programs


IN_ONE_PROCESS = """
import json
from dlrm_autoshard.commands.main import main
for line in json.load(open("commands.json")):
    assert main(line) == 0, line
"""


def test_its_commands_work_in_their_order(programs: Path, tmp_path: Path) -> None:
    where = shell(f"'{programs}/python' -I -c 'import dlrm_autoshard as d; print(d.__file__)'", tmp_path)
    assert where.startswith(str(programs.parent)), "the wheel's package, not the repository's"
    for name in ("launch", "configs"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    assert "train" in shell("dlrm-autoshard --help", tmp_path, programs)
    for ours, lines in itertools.groupby(QUICK["README.md"], lambda line: line.startswith("dlrm-autoshard ")):
        if ours:  # in one process, which imports torch once
            (tmp_path / "commands.json").write_text(json.dumps([shlex.split(line)[1:] for line in lines]))
            shell(f"'{programs}/python' -I -c '{IN_ONE_PROCESS}'", tmp_path, programs)
        else:
            for line in lines:
                shell(line, tmp_path, programs)
    for made in ("mine.yaml", "predictions.npy", "model.pt2", "runs/debug_cpu/result.json"):
        assert (tmp_path / made).exists(), made


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_moves_tables_where_the_data_drift_and_says_what_it_gained(programs: Path, tmp_path: Path) -> None:
    said = shell("dlrm-autoshard train demo --ranks 2", tmp_path, programs, limit=800)
    assert re.search(r"^\d+ moves?\b.*: saved [\d.]+% \([\d.]+ to [\d.]+%\)", said, re.MULTILINE), said
    decisions = [json.loads(line) for line in (tmp_path / "runs/demo/decisions.jsonl").read_text().splitlines()]
    assert any(decision["action"] == "moved" and 256 < decision["step"] < 384 for decision in decisions)


def bare_clone(folder: Path) -> Path:
    for name in ("dlrm_autoshard", "launch", "configs"):
        shutil.copytree(REPOSITORY / name, folder / name)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quickstart_starts_from_a_bare_clone(tmp_path: Path) -> None:
    assert "test AUC" in shell("bash launch/quickstart.sh --cpu", bare_clone(tmp_path / "clone"), limit=1700)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quickstart_starts_where_python_3_13_is_the_only_one(tmp_path: Path) -> None:
    found = [shutil.which("python3.13"), *Path.home().glob(".pyenv/versions/3.13.*/bin/python3.13")]
    works = [str(one) for one in found if one and not subprocess.call([one, "-c", ""], stderr=subprocess.DEVNULL)]
    if not works:
        pytest.skip("this machine has no Python 3.13")
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in [*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()]:
        if not program.name.startswith("python") and not (programs / program.name).exists():
            (programs / program.name).symlink_to(program)
    (programs / "python3").symlink_to(works[0])
    clone = bare_clone(tmp_path / "clone")
    environment = {**bare(), "PATH": str(programs)}
    done = subprocess.run(
        ["bash", "launch/quickstart.sh", "--cpu"],
        cwd=clone, env=environment, capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0 and "test AUC" in done.stdout, done.stdout + done.stderr
    assert "Making .venv with Python 3.13." in done.stdout
