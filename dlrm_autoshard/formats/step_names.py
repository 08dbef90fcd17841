"""Names checkpoints and plans in a run directory by their step.

step_name(640)                  # "step_00000640"
step_in("step_00000640")        # 640; None for any other name
"""

from __future__ import annotations

import re

_NAME = re.compile(r"step_(\d{8}|[1-9]\d{8,17})", re.ASCII)


def step_name(step: int) -> str:
    """Returns 'step_00000400' for 400."""
    return f"step_{step:08d}"


def step_in(name: str) -> int | None:
    """Returns 400 for 'step_00000400'; None for any other name."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])
