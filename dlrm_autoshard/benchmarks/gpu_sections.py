"""The sections of `bench gpu-all`: each takes a folder to work in and its seconds, and returns what it found.

    python -m dlrm_autoshard.benchmarks.gpu_sections roofline result.json 45

Figures are numbers, explanations strings; anything else (curves, tables) stays in the section's file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.gpu_kernels import planning, roofline, shards
from dlrm_autoshard.benchmarks.gpu_training import doctor, shared_gpu, synchronisation, training, uvm

SECTIONS: dict[str, Callable[[Path, float], dict[str, Any]]] = {
    function.__name__: function
    for function in (doctor, training, shared_gpu, uvm, shards, planning, roofline, synchronisation)
}


def main() -> None:
    name, target, seconds = sys.argv[1:4]
    folder = Path(target).parent.resolve()
    Path(target).write_text(json.dumps(SECTIONS[name](folder, float(seconds))))


if __name__ == "__main__":
    main()
