"""`with busy(core): ...`: another process keeps that core busy meanwhile."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from dlrm_autoshard.records.interval import epochs_file
from dlrm_autoshard.records.jsonl import read_jsonl

BURN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print('busy', flush=True)\nwhile True: pass"


@contextlib.contextmanager
def busy(core: int) -> Iterator[None]:
    """Runs a process that never rests on the core."""
    with subprocess.Popen([sys.executable, "-c", BURN, str(core)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "busy\n"
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def busy_in_epochs(core: int, first: int, last: int, run_dir: Path) -> Iterator[None]:
    """Keeps the core busy while epochs first to last are trained, by the run's own record."""

    def epochs_done() -> int:
        return len(read_jsonl(epochs_file(run_dir)))

    def share(over: threading.Event) -> None:
        while epochs_done() < first and not over.wait(0.01):
            pass
        with busy(core):
            while epochs_done() <= last and not over.wait(0.01):
                pass

    over = threading.Event()
    sharing = threading.Thread(target=share, args=(over,))
    sharing.start()
    try:
        yield
    finally:
        over.set()
        sharing.join()
