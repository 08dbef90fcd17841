"""A checkpoint is whole or not there: whatever kills the job, and whenever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_autoshard.train.checkpoint import CheckpointError, Checkpoints
from tests.ranks import run_ranks
from tests.trainers import make_runtime

ROWS = 1 << 17  # 8 MiB a table, so that a kill finds the writing under way


def state_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    """This rank's table and the dense part, each filled with a number that says step and owner."""
    return {
        f"tables.t{rank}.weight": torch.full((ROWS, 16), float(100 * step + rank)),
        "dense.w": torch.full((5,), float(step)),
    }


SHAPES = {"tables.t0.weight": (ROWS, 16), "tables.t1.weight": (ROWS, 16), "dense.w": (5,)}


def save_for_ever(rank: int, world_size: int, folder: Path, first: int, asynchronous: bool) -> None:
    checkpoints = Checkpoints(folder, make_runtime(rank, world_size), keep=1, asynchronous=asynchronous)
    if checkpoints.latest() is None:
        checkpoints.save(state_of(0, rank), {"step": 0})
        checkpoints.finish()
    for step in range(first, first + 1000):
        if rank == 0:
            (folder / "started").touch()
        checkpoints.save(state_of(step, rank), {"step": step})


def check(rank: int, world_size: int, folder: Path) -> int:
    """Loads the newest on other ranks than those that wrote it; every element is that step's."""
    checkpoints = Checkpoints(folder, make_runtime(rank, world_size))
    newest = checkpoints.latest()
    assert newest is not None
    wanted = state_of(-1, 1 - rank)
    state, _ = checkpoints.load(newest, wanted, SHAPES)
    step = int(state["step"])
    for name, value in state_of(step, 1 - rank).items():
        assert torch.equal(wanted[name], value), name
    return step


SAVE = """
import sys
from pathlib import Path
from tests.ranks import run_ranks
from tests.test_checkpoint import save_for_ever
if __name__ == "__main__":
    run_ranks(save_for_ever, 2, Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True")
"""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_in_the_middle_of_a_save_leaves_the_last_one_whole(asynchronous: bool, tmp_path: Path) -> None:
    script, folder, reached = tmp_path / "save.py", tmp_path / "checkpoints", -1
    script.write_text(SAVE)
    folder.mkdir()
    for attempt in range(2):
        (folder / "started").unlink(missing_ok=True)
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        job = subprocess.Popen(
            [sys.executable, str(script), str(folder), str(1000 * attempt + 1), str(asynchronous)],
            env=env,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 60
            while not ((folder / "started").exists() and any(folder.glob("*.tmp/*.distcp"))):
                assert time.monotonic() < deadline and job.poll() is None
                time.sleep(0.001)
            time.sleep(0.02 + 0.15 * attempt)
        finally:
            os.killpg(job.pid, signal.SIGKILL)  # the ranks and the server that forked them: all at once
            job.wait()
        steps = run_ranks(check, 2, folder, timeout=60)
        assert steps[0] == steps[1] >= reached
        reached = steps[0]


def keep_and_damage(rank: int, world_size: int, folder: Path) -> tuple[list[str], list[str]]:
    runtime = make_runtime(rank, world_size)
    checkpoints = Checkpoints(folder, runtime, keep=2)
    if rank == 0:
        (folder / "step_00000001.tmp").mkdir(parents=True)  # left by a kill
    runtime.barrier()
    tensors: dict[str, Any] = {"w": torch.arange(6.0) + rank, f"own{rank}": torch.zeros(4)}
    for step in (5, 10, 15):
        path = checkpoints.save(tensors, {"step": step}, extra={"x": step})
    kept = sorted(found.name for found in folder.iterdir())
    shapes = {"w": (6,), **{f"own{r}": (4,) for r in range(world_size)}}
    before = tensors["w"].clone()
    messages = []
    for wrong in ({**shapes, "new": (3,)}, {**shapes, "w": (7,)}, {"w": (6,)}):
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(path, tensors, wrong)
        messages.append(str(caught.value))
        assert torch.equal(tensors["w"], before)
    assert checkpoints.latest(before=15) == folder / "step_00000010"
    dist.barrier()
    if rank == 0:
        file = next(path.glob("__1_*.distcp"))
        file.write_bytes(file.read_bytes()[:-200])
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(path, tensors, shapes)
    return kept, [*messages, str(caught.value)]


def test_the_newest_are_kept_and_what_differs_or_is_torn_is_named(tmp_path: Path) -> None:
    (kept, messages), *_ = run_ranks(keep_and_damage, 2, tmp_path)
    assert kept == ["step_00000010", "step_00000015"]
    more, shape, foreign, torn = messages
    assert "new is not in it" in more and "Nothing was loaded" in more
    assert "w is [6], the model has [7]" in shape
    assert "own0 is not in the model; own1 is not in the model" in foreign
    assert "step_00000015' cannot be read on rank(s)" in torn and "Traceback" not in torn
