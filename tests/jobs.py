"""Starts training jobs as people do, by torchrun or by hand, to stop, kill and watch them; and runs other commands."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from dlrm_autoshard.commands.main import main

REPOSITORY = Path(__file__).parents[1]
TRAIN = str(REPOSITORY / "launch" / "train.py")
CONFIG = """
data:
  source: synthetic
  train_samples: 20000
  test_samples: 1000
  tables:
    - {name: a, num_embeddings: 500}
    - {name: b, num_embeddings: 50, mean_pooling: 3.0}
    - {name: c, num_embeddings: 9}
train: {batch_size: 64, epochs: 2}
profile: {enabled: false}
autoshard: {enabled: false}
"""
TINY_CONFIG = """
run: {name: job, device: cpu, pin_cores: false, dir: runs}
data:
  source: synthetic
  train_samples: 300
  test_samples: 0
  tables:
    - {name: user, num_embeddings: 500}
    - {name: item, num_embeddings: 50, mean_pooling: 3.0}
train: {batch_size: 64}
profile: {enabled: false}
autoshard: {enabled: false}
"""
"""Config of a job that takes a second, for commands run in their own folder; its runs lie in `runs` there."""


def torchrun(ranks: int, *arguments: str, restarts: int = 0, start: tuple[str, ...] = ("--standalone",)) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *start, f"--nproc_per_node={ranks}"]
    return [*command, f"--max_restarts={restarts}", TRAIN, *arguments]


def said_by(*arguments: str) -> str:
    """Returns what `dlrm-autoshard ARGUMENTS` prints, run in this process, which saves importing torch again."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(arguments) == 0
    return said.getvalue()


class Job:
    """A started job. `said()` returns its output so far."""

    def __init__(self, command: list[str], folder: Path, **environment: str) -> None:
        self._output = folder / f"output-{time.monotonic_ns()}.txt"
        settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with open(self._output, "w") as output:
            self.process = subprocess.Popen(
                command, cwd=REPOSITORY, env=settings, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def said(self) -> str:
        return self._output.read_text()

    def ranks(self) -> dict[int, psutil.Process]:
        """Returns the processes that are alive, by rank."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                rank = process.environ().get("RANK")
                if rank is not None and TRAIN in process.cmdline():
                    found[int(rank)] = process
        return found

    def ends_within(self, seconds: float) -> int:
        """Returns the exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended within {seconds:g} s:\n{self.said()}") from None


@contextlib.contextmanager
def started(command: list[str], folder: Path, **environment: str) -> Iterator[Job]:
    """Starts a job, and ends it and its ranks afterwards, whatever happens meanwhile."""
    job = Job(command, folder, **environment)
    family = [psutil.Process(job.process.pid)]
    try:
        yield job
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += family[0].children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        job.process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.01)


def steps_saved(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*") if path.suffix == "")
