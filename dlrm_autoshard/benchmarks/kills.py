"""kill -9 of a rank before, in the middle of and after moves: torchrun restarts, and the model must end bit-equal."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_autoshard.benchmarks.harness import BenchError
from dlrm_autoshard.benchmarks.moving_job import MOMENTS, MOVE_EVERY

TITLE = "kill -9 of a rank at seeded moments around moves: how many jobs end bit-equal to the uninterrupted one"
ROUGH_TIME = "4 min"

SEED, STEPS, WORLD_SIZE = 5, 30, 2


def run(quick: bool) -> dict[str, Any]:
    draw = np.random.default_rng(SEED)
    kills = 4 if quick else 16
    with tempfile.TemporaryDirectory() as temporary:
        whole = train(Path(temporary, "whole"))
        survived, notes = 0, []
        for number in range(kills):
            moment = MOMENTS[number % len(MOMENTS)]
            step, rank = int(draw.integers(1, STEPS - 2 * MOVE_EVERY)), int(draw.integers(WORLD_SIZE))
            folder = Path(temporary, f"kill_{number}")
            final = train(folder, "--kill", moment, "--at-step", str(step), "--kill-rank", str(rank))
            killed, equal = (folder / "killed").exists(), final == whole
            survived += killed and equal
            if not (killed and equal):
                what = "ended with other bits" if killed else "was never killed"
                notes.append(f"kill {number} ({moment} a move, rank {rank}, from step {step}) {what}.")
    return {
        "figures": {
            "kills": kills,
            "survived_bit_equal": survived,
            "share": survived / kills,
            "final_loss": whole["loss"],
        },
        "targets": {"share": "== 1.0"},
        "notes": notes or [f"Moments in turn: {', '.join(MOMENTS)}; steps and ranks drawn with seed {SEED}."],
    }


def train(folder: Path, *options: str, steps: int = STEPS, seed: int = SEED) -> dict[str, Any]:
    """The job's final loss and the digest of every tensor, after torchrun is through with it."""
    folder.mkdir(parents=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={WORLD_SIZE}", "--max-restarts=2",
        "--monitor-interval=0.1", "--master-addr=127.0.0.1", f"--master-port={free_port()}",
        "-m", "dlrm_autoshard.benchmarks.moving_job",
        "--dir", str(folder), "--seed", str(seed), "--steps", str(steps), *options,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    if done.returncode != 0:
        raise BenchError(f"the job ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    finals = [json.loads((folder / f"final_{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    digests = {name: digest for final in finals for name, digest in final["digests"].items()}
    return {"loss": finals[0]["loss"], "digests": digests}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
