"""Thousands of steps with a move every few of them: no leak, and not a bit that differs from never having moved."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from dlrm_autoshard.benchmarks.harness import on_pinned_ranks
from dlrm_autoshard.benchmarks.moving_job import MOVE_EVERY, MovingTrainer, settings
from dlrm_autoshard.distributed.runtime import Runtime

TITLE = "thousands of steps and hundreds of moves: memory must not grow, the model must be bit-equal to an unmoved one"
ROUGH_TIME = "5 min"


def run(quick: bool) -> dict[str, Any]:
    steps = 400 if quick else 8000
    with tempfile.TemporaryDirectory() as temporary:
        ranks = on_pinned_ranks(_soak, 2, temporary, steps, timeout=1800)
    digests = [{k: v for rank in ranks for k, v in rank[kind].items()} for kind in ("moved", "still")]
    growth = max(rank["rss"][-1] - rank["rss"][len(rank["rss"]) // 3] for rank in ranks)
    return {
        "figures": {
            "steps": steps,
            "moves": steps // MOVE_EVERY,
            "moved_mib": ranks[0]["moved_bytes"] / 2**20,
            "tensors_that_differ": sum(digests[0][name] != digests[1].get(name) for name in digests[0]),
            "memory_growth_mib": growth / 2**20,
        },
        "targets": {"tensors_that_differ": "== 0", "memory_growth_mib": "<= 24"},
        "notes": ["memory_growth_mib: resident memory at the end beyond that after a third of the steps, worst rank."],
    }


def _soak(rank: int, world_size: int, folder: str, steps: int) -> dict[str, Any]:
    world, minutes = dist.group.WORLD, timedelta(minutes=5)
    assert world is not None
    groups = dist.new_group(timeout=minutes), dist.new_group(timeout=minutes)
    runtime = Runtime(rank, world_size, rank, world_size, torch.device("cpu"), world, *groups)
    result: dict[str, Any] = {"rss": []}
    for kind in ("moved", "still"):
        run_dir = Path(folder, kind)
        if rank == 0:
            run_dir.mkdir()
        runtime.barrier()
        config = settings(Path(folder), seed=3, steps=steps)
        config = config.model_copy(
            update={"checkpoint": config.checkpoint.model_copy(update={"enabled": False, "every_steps": None})}
        )
        trainer = _Soaked(config, runtime, run_dir, moves=kind == "moved")
        trainer.rss = result["rss"] if kind == "moved" else []
        with open(run_dir / f"said_{rank}.txt", "w") as said, contextlib.redirect_stdout(said):
            trainer.run()
        result[kind] = trainer.digests()
        if trainer.moves is not None:
            result["moved_bytes"] = trainer.moves.moved
        del trainer
        gc.collect()
    return result


class _Soaked(MovingTrainer):
    rss: list[int]

    def _train_step(self, *, sampled: bool) -> None:
        super()._train_step(sampled=sampled)
        if self.position.step % 20 == 0:
            self.rss.append(int(psutil.Process().memory_info().rss))
