"""kill -9 at seeded random moments, of a rank or of torchrun: the job is started again, and must end bit-equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.moving_job import MOMENTS, Kill

SEED, STEPS, KILLS_A_JOB = 5, 30, 10
_LAST_KILL = 22  # the step up to which a kill may wait for its moment: moves and saves come every few steps
_START_SECONDS = 120.0  # of one start of a job, at most


class Stuck(Exception):
    """A job did not end, or not as it should."""


def kill_often(kills: int, seed: int, each: int = KILLS_A_JOB) -> dict[str, Any]:
    """Kills jobs, and returns the number of kills, and of those that a job survived bit-equal without leaving anything.

    A job may end before all of its kills: ranks whose torchrun is killed go on for the second in which they notice it.
    """
    draw = np.random.default_rng(seed)
    whole: dict[int, Any] = {}
    made = survived = 0
    notes = []
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(2 * -(-kills // each)):
            if made >= kills:
                break
            ranks = 2 + number % 2
            if ranks not in whole:
                whole[ranks] = train(Path(temporary, f"whole_{ranks}"), ranks=ranks)
            folder = Path(temporary, f"job_{number}")
            plan = draw_kills(draw, min(each, kills - made), ranks, first=number * each)
            try:
                final = train(folder, plan, ranks=ranks)
                problems = differences(final, whole[ranks])
            except Stuck as error:
                problems = [str(error)]
            problems += left_behind(folder)
            done = len(list(folder.glob("killed_*")))
            made += done
            survived += done if not problems else 0
            if problems or done < len(plan):
                notes.append(f"job {number} on {ranks} ranks, {done} of {plan}: {'; '.join(problems)}")
    return {"kills": made, "survived": survived, "notes": notes}


def differences(final: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """Returns the differences between results of `train` from a killed and from an uninterrupted job."""
    digests = final["digests"]
    names = sorted(name for name, digest in whole["digests"].items() if digests.get(name) != digest)
    problems = [f"it ended with other bits in {', '.join(names[:5])} ({len(names)} in all)"] if names else []
    if final["loss"] != whole["loss"]:
        problems.append(f"its last loss is {final['loss']}, not {whole['loss']}")
    return problems


def draw_kills(draw: np.random.Generator, count: int, ranks: int, first: int = 0) -> list[Kill]:
    """Draws steps, ranks, victims and delays; moments take turns, so that each occurs."""
    moments = [MOMENTS[(first + number) % len(MOMENTS)] for number in range(count)]
    moments.sort(key=lambda moment: moment != "planning")  # a job plans before its first step, and then no more
    steps = sorted(int(step) for step in draw.integers(1, _LAST_KILL, count))
    return [
        Kill(
            moment,
            0 if moment == "planning" else step,
            int(draw.integers(ranks)),
            "torchrun" if draw.random() < 0.25 else "rank",
            float(draw.random()) * (0.3 if moment in ("planning", "starting") else 0.02),
        )
        for moment, step in zip(moments, steps, strict=True)
    ]


def train(
    folder: Path, kills: Sequence[Kill] = (), *, ranks: int = 2, steps: int = STEPS, rows: bool = False
) -> dict[str, Any]:
    """Returns the job's final loss and the digest of every tensor, after all kills. A killed torchrun is started again.
    rows: tables are also split by rows."""
    (folder / "tmp").mkdir(parents=True)
    (folder / "kills.json").write_text(json.dumps([asdict(kill) for kill in kills]))
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--max-restarts=100",
        "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4().hex}",
        "-m", "tests.moving_job",
        "--dir", str(folder), "--seed", str(SEED), "--steps", str(steps), *["--rows"] * rows,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
    for start in range(len(kills) + 1):
        said = folder / f"said_{start}.txt"
        with open(said, "w") as output:
            job = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            try:
                status = job.wait(_START_SECONDS * (1 + len(kills)))
            except subprocess.TimeoutExpired as error:
                job.kill()
                raise Stuck(f"the job did not end:\n{said.read_text()[-3000:]}") from error
        if status == 0:
            break
        if status > 0:
            raise Stuck(f"the job ended with status {status}:\n{said.read_text()[-3000:]}")
    finals = [json.loads((folder / f"final_{rank}.json").read_text()) for rank in range(ranks)]
    digests = {name: digest for final in finals for name, digest in final.items()}
    return {"loss": (folder / "loss").read_text(), "digests": digests}


def left_behind(folder: Path) -> list[str]:
    """Returns what a job left behind: processes, shared memory, sockets, drafts. A process may take a moment to end."""
    deadline = time.monotonic() + 5
    while living := [str(process.pid) for process in psutil.process_iter() if _is_of(process, folder)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    problems = [f"processes {', '.join(living)} still run"] if living else []
    drafts = [path for path in folder.rglob("*") if path.suffix in (".tmp", ".old", ".new") or ".latest-" in path.name]
    sockets = [path for path in folder.rglob("*") if path.is_socket()]
    shared = [path for path in Path("/dev/shm").glob("*dlrm*")]
    return problems + [f"'{path}' is left" for path in (*drafts, *sockets, *shared)]


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return str(folder) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
