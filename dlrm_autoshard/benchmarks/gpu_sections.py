"""Runs a section of `bench gpu-all`: a function of a folder to work in, its seconds, and `found`, where results go.

    python -m dlrm_autoshard.benchmarks.gpu_sections peer result.json 45

Figures are numbers (some with a 95% interval in "spread"), explanations are strings; anything else stays in the
section's file. What was found before a section failed or was ended is written all the same.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrm_autoshard.benchmarks.gpu_kernels import planning, shards
from dlrm_autoshard.benchmarks.gpu_peer import peer, stages, variants

SECTIONS: dict[str, Callable[[Path, float, dict[str, Any]], None]] = {
    function.__name__: function for function in (peer, variants, stages, shards, planning)
}


def main() -> None:
    name, target, seconds = sys.argv[1:4]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found: dict[str, Any] = {}
    try:
        SECTIONS[name](Path(target).parent.resolve(), float(seconds), found)
    finally:
        Path(target).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
