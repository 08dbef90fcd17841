"""How fast one GPU is, in one command: `dlrm-autoshard bench gpu-all --json`. Whether it is right: tests/test_gpu.py.

Needs CUDA and fbgemm-gpu. Each section of gpu_sections.py runs in a process of its own under a time limit, so that one
failure costs one section. What they find goes to `runs/gpu-all/<section>.json` as it is found, and into this command's
record at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.harness import BenchError

TITLE = "training speed, fused shards and planning on a real GPU"
ROUGH_TIME = "5 min (needs a GPU)"

LIMITS = {
    "peer": 75,
    "variants": 60,
    "stages": 45,
    "shards": 80,
    "planning": 160,
}
"""Seconds for each section."""
GRACE = 30
"""Seconds more until a section is ended: to load libraries, and for what it had begun when its time was up."""
TARGETS = {
    "peer.w_small: over the fastest of them": ">= 1",
    "peer.w_emb: over the fastest of them": ">= 1",
    "shards.measured": ">= 1000",
}


def run(quick: bool) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise BenchError("gpu-all needs a GPU, and torch sees none. Run it on a machine with CUDA and fbgemm-gpu.")
    out = Path("runs/gpu-all")
    out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    spread: dict[str, list[float]] = {}
    notes, failed = [], 0
    for section, limit in LIMITS.items():  # one after another: they are timed
        found, failure = run_section(section, out, limit / 3 if quick else limit)
        figures |= {f"{section}.{key}": value for key, value in found.items() if isinstance(value, int | float)}
        spread |= {f"{section}.{key}": interval for key, interval in found.get("spread", {}).items()}
        notes += [f"{section}.{key}: {value}" for key, value in found.items() if isinstance(value, str)]
        if failure:
            failed += 1
            notes.append(f"{section} failed: {failure}")
    notes.append("exchanges in `planning` follow an assumed law of NVLink (exchange_model.py); computation is measured")
    return judged(figures, failed, notes, spread)


def judged(
    figures: dict[str, Any], failed: int, notes: list[str], spread: dict[str, list[float]] | None = None
) -> dict[str, Any]:
    """Not met where a section failed, or did not find what there is a target for."""
    targets = TARGETS | {"sections_failed": "<= 0"}
    return {
        "figures": figures | {"sections_failed": failed},
        "targets": targets,
        "spread": spread or {},
        "notes": notes,
    }


def run_section(section: str, out: Path, limit: float) -> tuple[dict[str, Any], str | None]:
    """Returns the section's output, and what went wrong if anything did."""
    target = out / f"{section}.json"
    target.unlink(missing_ok=True)
    started = time.monotonic()
    command = [sys.executable, "-m", "dlrm_autoshard.benchmarks.gpu_sections", section, str(target), str(limit)]
    log, failure = out / f"{section}.log", None
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            # Sections budget themselves; this is for one that hangs.
            if process.wait(timeout=limit + GRACE):
                failure = (log.read_text().strip().splitlines() or ["no message"])[-1]
        except subprocess.TimeoutExpired:
            failure = f"took more than {limit + GRACE:.0f} s"
        finally:
            if process.poll() is None:
                _end(process)
    found = json.loads(target.read_text()) if target.exists() else {}
    if not found:
        failure = failure or "it ended without a word of what it found"
    found["seconds"] = round(time.monotonic() - started, 1)
    return found, failure


def _end(process: subprocess.Popen[bytes]) -> None:
    """And what it started: ranks of a section would run on beside the next one, which is timed."""
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
