"""A run's directory while a job writes to it: somebody may rename it, or remove it.

folder = RunFolder(run_dir)
if folder.was_replaced(): ...               # say so, and write down again what a run needs
"""

from __future__ import annotations

import os
from pathlib import Path

REPLACED = (
    "'%s' was renamed or removed while this job writes to it. What follows goes to a new folder of that name; what was "
    "written before lies where it was moved to"
)


class RunFolder:
    """Watches a run's directory by its identity on disk."""

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, _identity(path)

    def was_replaced(self) -> bool:
        """Whether the directory is gone, or another one, since this was last asked."""
        before, self._known = self._known, _identity(self._path)
        return before is not None and before != self._known


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
