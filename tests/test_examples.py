"""The examples of launch/examples/ run as their first line says, and are short enough to read."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_autoshard.benchmarks.peer_torchrec import DIRECTORY, find_torchrec
from tests.jobs import REPOSITORY

EXAMPLES = {path.stem: path for path in sorted((REPOSITORY / "launch/examples").glob("*.py"))}
SAYS = {
    "quickstart": r"\d+ steps: auc 0\.[5-9]",
    "own_loop": "2 tables on 2 rank",
    "torchrec_loop": "4 tables on 2 rank",
    "custom_source": r"auc 0\.[6-9]",
    "tower": r"auc 0\.[5-9]",
    "serve_export": r"probabilities: \[0\.\d+, 0\.\d+, 0\.\d+\]",
}


def said_when_run(example: str, folder: Path) -> str:
    """What it says, started by the command in its first line, in a folder of its own."""
    (command,) = re.findall(r"`(.+?)`", ast.get_docstring(ast.parse(EXAMPLES[example].read_text())) or "")
    program, *arguments, file = shlex.split(command)
    assert file == f"launch/examples/{example}.py"
    launcher = ["-m", "torch.distributed.run", "--standalone"] if program == "torchrun" else []
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    if directory := os.environ.get(DIRECTORY):
        environment["PYTHONPATH"] += f":{directory}"
    line = [sys.executable, *launcher, *arguments, str(EXAMPLES[example])]
    ended = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("example", sorted(EXAMPLES.keys() - {"attention"}))  # which test_sequence_jobs.py trains
def test_an_example_runs_as_it_says(example: str, tmp_path: Path) -> None:
    if example == "torchrec_loop" and (why_not := find_torchrec()):
        pytest.skip(why_not)
    assert re.search(SAYS[example], said_when_run(example, tmp_path))


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_read_in_a_minute(example: str) -> None:
    lines = EXAMPLES[example].read_text().splitlines()
    assert len(lines) <= 60 and lines[0].startswith('"""') and lines[0].endswith('"""')
