"""How long a checkpoint of 2 GiB of tables on two ranks takes, written and read, beside torch's own format."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dlrm_autoshard.benchmarks.harness import Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import median_with_interval, paired_ratio
from dlrm_autoshard.distributed.ranks.runtime import runtime_of
from dlrm_autoshard.formats.step_names import step_name
from dlrm_autoshard.training.checkpoints.checkpoint import Checkpoints
from dlrm_autoshard.training.checkpoints.manifest import SavedState

TITLE = "a checkpoint of 2 GiB on 2 ranks: seconds to write and to read, beside torch.distributed.checkpoint"
ROUGH_TIME = "2 min"
TABLES, FLOATS = 64, 4 << 20
"""A rank's, and of each: 16 MiB."""
ARMS = ("ours", "through_page_cache", "dcp")


def run(quick: bool) -> dict[str, Any]:
    """In the working directory: where its file system has no direct writes, two of the arms are the same."""
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-speed-", dir="."))
    try:
        args = (folder, 1 if quick else 6, TABLES // (16 if quick else 1))
        took = on_pinned_ranks(measure, 2, *args, timeout=900)[0]
    finally:
        shutil.rmtree(folder)
    found = Findings()
    for what, by_arm in took.items():
        for arm, seconds in by_arm.items():
            found.put(f"{arm}: seconds to {what}", median_with_interval(seconds))
        for arm in ARMS[1:]:
            found.put(f"{what}: {arm} / ours", paired_ratio(by_arm[arm], by_arm["ours"]))
    found.notes = [
        "until every byte is on disk, on both ranks; ours with a digest of every 16 MiB, written and checked",
        "through_page_cache: ours without O_DIRECT. dcp: torch.distributed.checkpoint.save and load as they come",
        "read: right after it was written, in the same processes; what went through the page cache is still there",
    ]
    return vars(found)


def measure(rank: int, world_size: int, folder: Path, rounds: int, tables: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each arm, in turns."""
    values = {f"tables.r{rank}t{i}.weight": torch.rand(FLOATS) for i in range(tables)}
    shapes = {f"tables.r{r}t{i}.weight": (FLOATS,) for r in range(world_size) for i in range(tables)}
    took: dict[str, dict[str, list[float]]] = {what: {arm: [] for arm in ARMS} for what in ("write", "read")}
    world = dist.group.WORLD
    assert world is not None
    checkpoints = Checkpoints(folder / "ours", runtime_of(world, torch.device("cpu")))
    path, theirs = checkpoints.folder / step_name(0), folder / "dcp"

    def write_and_read(arm: str) -> dict[str, float]:
        if arm == "dcp":
            written = seconds_of(lambda: dcp.save(values, checkpoint_id=theirs))
            return {"write": written, "read": seconds_of(lambda: dcp.load(values, checkpoint_id=theirs))}
        with mock.patch.object(os, "O_DIRECT", os.O_DIRECT if arm == "ours" else 0):
            written = seconds_of(lambda: checkpoints.save(values, SavedState(step=0)))
            return {"write": written, "read": seconds_of(lambda: checkpoints.load(path, values, shapes))}

    for number in range(rounds + 1):
        for arm in ARMS[number % 3 :] + ARMS[: number % 3]:
            for what, seconds in write_and_read(arm).items():
                if number:  # the first round warms up
                    took[what][arm].append(seconds)
            if rank == 0:
                for left in (path, theirs):
                    shutil.rmtree(left, ignore_errors=True)
            dist.barrier()
    return took


def seconds_of(action: Callable[[], object]) -> float:
    """On the slower rank."""
    dist.barrier()
    started = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - started
