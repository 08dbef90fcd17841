"""`with busy(core): ...`: beside what it holds, another process wants that core to itself."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

BURN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print('busy', flush=True)\nwhile True: pass"


@contextlib.contextmanager
def busy(core: int) -> Iterator[None]:
    """A process that wants the core to itself."""
    with subprocess.Popen([sys.executable, "-c", BURN, str(core)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "busy\n"
            yield
        finally:
            process.kill()
