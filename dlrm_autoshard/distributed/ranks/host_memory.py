"""Memory that this process could still take of its machine."""

from __future__ import annotations

from pathlib import Path

import psutil


def free_host_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes: of the machine, or of its control group where that is tighter."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free  # no such group, or one of the first version, whose limit the kernel doesn't tell us here
    if limit == "max":
        return free
    return max(0, min(free, int(limit) - used + int(stat.get("inactive_file", 0))))
