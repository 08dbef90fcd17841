"""Writes a torch.profiler trace of one step, with the clock's stages as spans beside the kernels.

Open the file in chrome://tracing or Perfetto.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from dlrm_autoshard.distributed.stage_clock import StageClock

LOG = logging.getLogger("dlrm_autoshard")
_STEP = "dlrm_step"


@contextlib.contextmanager
def traced(path: Path, clock: StageClock) -> Iterator[None]:
    """Runs the block (one sampled step) under the profiler and writes the trace to `path`; warns if it cannot."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler, torch.profiler.record_function(_STEP):
        yield
    try:
        _write(path, profiler, clock)
    except (OSError, RuntimeError, ValueError, StopIteration) as error:  # a full disk may also truncate the trace
        LOG.warning("a trace is lost: '%s' cannot be written: %s", path, error)


def _write(path: Path, profiler: torch.profiler.profile, clock: StageClock) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    step = next(event for event in trace["traceEvents"] if event.get("name") == _STEP and "ts" in event)
    trace["traceEvents"] += [
        {"name": stage, "cat": "stage", "ph": "X", "pid": step["pid"], "tid": "stages",
         "ts": step["ts"] + 1e6 * start, "dur": 1e6 * (end - start)}
        for stage, start, end in clock.spans
    ]  # fmt: skip
    path.write_text(json.dumps(trace))
