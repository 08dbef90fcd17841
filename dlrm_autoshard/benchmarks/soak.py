"""Thousands of steps with a move every 200: no memory, no descriptor is lost, and no bit differs from never moving."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from dlrm_autoshard.benchmarks.harness import Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.moving_job import MovingTrainer, settings
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.ranks.runtime import runtime_of

TITLE = "10,000 steps with a move every 200: memory and descriptors stay flat, the model is bit-equal to an unmoved one"
ROUGH_TIME = "5 min"

MOVE_EVERY = 200
_SAMPLE_EVERY = 20  # steps between two readings of memory and descriptors


def run(quick: bool) -> dict[str, Any]:
    steps = 2_000 if quick else 10_000
    with tempfile.TemporaryDirectory() as temporary:
        ranks = on_pinned_ranks(_soak, 2, temporary, steps, timeout=1800)
    digests = [{k: v for rank in ranks for k, v in rank[kind].items()} for kind in ("moved", "still")]
    settled = [rank["readings"][len(rank["readings"]) // 3 :] for rank in ranks]
    slopes = [slope([memory for memory, _ in readings]) for readings in settled]
    found = Findings()
    found.put("steps", steps)
    found.put("moves", steps // MOVE_EVERY)
    found.put("moved_mib", ranks[0]["moved_bytes"] / 2**20)
    found.put("tensors_that_differ", sum(digests[0][name] != digests[1].get(name) for name in digests[0]), "== 0")
    found.put("memory_mib_per_1000_steps", max(slopes) / 2**20 * 1000 / _SAMPLE_EVERY, "<= 1")
    found.put("descriptors_more", max(readings[-1][1] - readings[0][1] for readings in settled), "<= 0")
    found.notes = ["memory_mib_per_1000_steps: resident memory's slope over the last two thirds, worst rank."]
    return vars(found)


def slope(values: Sequence[float]) -> float:
    """Of the straight line through them, a step from one to the next."""
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])


def _soak(rank: int, world_size: int, folder: str, steps: int) -> dict[str, Any]:
    world = dist.group.WORLD
    assert world is not None
    runtime = runtime_of(world, torch.device("cpu"))
    result: dict[str, Any] = {"readings": []}
    for kind in ("moved", "still"):
        run_dir = Path(folder, kind)
        if rank == 0:
            run_dir.mkdir()
        runtime.barrier()
        config = settings(Path(folder), seed=3, steps=steps, move_every=MOVE_EVERY, checkpoints=False)
        trainer = _Soaked(config, runtime, run_dir, moves=kind == "moved")
        trainer.readings = result["readings"] if kind == "moved" else []
        with open(run_dir / f"said_{rank}.txt", "w") as said, contextlib.redirect_stdout(said):
            trainer.run()
        result[kind] = trainer.digests()
        if trainer.moves is not None:
            result["moved_bytes"] = trainer.moves.moved
        del trainer
        gc.collect()
    return result


class _Soaked(MovingTrainer):
    readings: list[tuple[int, int]]
    """(bytes of resident memory, open descriptors) every few steps."""

    def _train_step(self, *, sampled: bool) -> Batch:
        batch = super()._train_step(sampled=sampled)
        if self.job.position.step % _SAMPLE_EVERY == 0:
            process = psutil.Process()
            self.readings.append((int(process.memory_info().rss), process.num_fds()))
        return batch
