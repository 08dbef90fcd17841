"""Memory that this process could still take: of its machine, or its GPU. Without torch until a GPU is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch


def free_memory(device: torch.device | None = None) -> int:
    """Bytes: of its GPU; else of the machine, or of its control group where that is tighter."""
    if device is None or device.type != "cuda":
        return free_host_memory()
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


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
