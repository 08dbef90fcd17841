"""Thousands of steps with a move every 200 lose no memory and no descriptor, and change no bit."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from dlrm_autoshard.distributed.lookup.lookups import SentIds
from dlrm_autoshard.distributed.ranks.runtime import runtime_of
from tests.moving_job import MovingTrainer, settings
from tests.ranks import run_ranks

MOVE_EVERY = 200
_SAMPLE_EVERY = 20  # steps between two readings of memory and descriptors


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_steps_with_moves_lose_nothing_and_change_no_bit(tmp_path: Path) -> None:
    ranks = run_ranks(_soak, 2, str(tmp_path), 10_000, timeout=1700)
    moved, still = ({k: v for rank in ranks for k, v in rank[kind].items()} for kind in ("moved", "still"))
    assert moved == still and ranks[0]["moved_bytes"]
    for rank in ranks:
        readings = rank["readings"][len(rank["readings"]) // 3 :]
        memory, descriptors = zip(*readings, strict=True)
        slope = float(np.polyfit(np.arange(len(memory)), memory, 1)[0])
        assert slope / 2**20 * 1000 / _SAMPLE_EVERY <= 1, "MiB of resident memory a thousand steps"
        assert descriptors[-1] <= descriptors[0]


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

    def _train_step(self, ids: SentIds) -> None:
        super()._train_step(ids)
        if self.job.position.step % _SAMPLE_EVERY == 0:
            process = psutil.Process()
            self.readings.append((int(process.memory_info().rss), process.num_fds()))
