"""Identifies the hardware and libraries that a measured cost belongs to.

    hardware_fingerprint()        # {"device": "cpu", "processor": "AMD EPYC", "cores": 2, ..., "fbgemm": "1.8.0"}

Costs under another fingerprint are another machine's: a start for a cost model, not measurements of this one.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from dlrm_autoshard.distributed.tables.rowwise_adagrad import plain_loop_is_faster
from dlrm_autoshard.formats.versions import installed_version


def hardware_fingerprint(device: torch.device = torch.device("cpu")) -> dict[str, Any]:
    """Returns what measured times depend on besides the shard; jobs with equal fingerprints can share measurements."""
    updates = {}
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        updates = {"rowwise_adagrad": "plain loop" if plain_loop_is_faster() else "generated code"}
        processor = _processor()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device": device.type,
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__.split("+")[0],
        "fbgemm": installed_version("fbgemm-gpu-cpu") or installed_version("fbgemm-gpu") or "none",
        **updates,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = dict(
            (key.strip(), value.strip())
            for key, _, value in (line.partition(":") for line in info.read_text().split("\n\n")[0].splitlines())
        )
        name = fields.get("model name", platform.machine())
        return f"{name} family {fields.get('cpu family', '?')} model {fields.get('model', '?')}"
    return platform.processor() or platform.machine()
