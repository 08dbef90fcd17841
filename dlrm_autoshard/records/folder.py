"""Detects that a run's directory was renamed or removed while a job writes to it.

folder = RunFolder(run_dir)
if folder.was_replaced(): ...               # warn, and write the run's files again
"""

from __future__ import annotations

import os
from pathlib import Path

REPLACED = (
    "'%s' was renamed or removed while this job was writing to it. Later records go to a new folder of that name; "
    "earlier ones stay wherever it was moved"
)


class RunFolder:
    """Watches a run's directory by device and inode."""

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, _identity(path)

    def was_replaced(self) -> bool:
        """Returns whether the directory has gone or been replaced since the last call."""
        before, self._known = self._known, _identity(self._path)
        return before is not None and before != self._known


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
