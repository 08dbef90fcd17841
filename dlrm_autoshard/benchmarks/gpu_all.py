"""Measures how fast one GPU is; tests/test_gpu.py tests whether it is right.

Each section of gpu_sections.py runs in its own process under a time limit, so that a failure costs one section. Results
go to `runs/gpu-all/<section>.json`, and into the record at the end.
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
"""Seconds beyond its limit until a section is ended: for loading libraries and finishing what it has begun."""
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
    for section, limit in LIMITS.items():  # one at a time: they measure time
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
    """Returns the outcome, with targets that are missed where a section failed or lacks their figure."""
    targets = TARGETS | {"sections_failed": "<= 0"}
    return {
        "figures": figures | {"sections_failed": failed},
        "targets": targets,
        "spread": spread or {},
        "notes": notes,
    }


def run_section(section: str, out: Path, limit: float) -> tuple[dict[str, Any], str | None]:
    """Returns the section's results, and what went wrong, if anything."""
    target = out / f"{section}.json"
    target.unlink(missing_ok=True)
    started = time.monotonic()
    command = [sys.executable, "-m", "dlrm_autoshard.benchmarks.gpu_sections", section, str(target), str(limit)]
    log, failure = out / f"{section}.log", None
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            # Sections keep to their limit; this ends one that hangs.
            if process.wait(timeout=limit + GRACE):
                failure = (log.read_text().strip().splitlines() or ["no message"])[-1]
        except subprocess.TimeoutExpired:
            failure = f"took more than {limit + GRACE:.0f} s"
        finally:
            if process.poll() is None:
                _end(process)
    found = json.loads(target.read_text()) if target.exists() else {}
    if not found:
        failure = failure or "it ended without results"
    found["seconds"] = round(time.monotonic() - started, 1)
    return found, failure


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the section and all that it started, which would otherwise disturb the next section's timing."""
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
