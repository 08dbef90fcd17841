"""Free memory of the machine or a GPU. Imports torch only for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch


def free_memory(device: torch.device | None = None) -> int:
    """Returns free bytes: of the GPU; else of the machine, or of its control group if that is tighter."""
    if device is None or device.type != "cuda":
        return free_host_memory()
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_host_memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns free bytes of the machine, or of its control group (either version) if that is tighter."""
    free = int(psutil.virtual_memory().available)
    for folder, limit, used, cached in (
        (groups, "memory.max", "memory.current", "inactive_file"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, taken = (folder / limit).read_text().strip(), int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if most != "max":  # version 1 without a limit says nearly 2^63
                free = min(free, int(most) - taken + int(stat.get(cached, 0)))
        except (OSError, ValueError):
            continue  # no such group
    return max(0, free)
