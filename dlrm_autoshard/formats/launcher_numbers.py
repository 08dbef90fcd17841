"""Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which launchers set.

launcher_number("WORLD_SIZE", 1)            # 1 without a launcher
"""

from __future__ import annotations

import os
import re

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.sentences import show


def launcher_number(name: str, without: int) -> int:
    """Returns the environment variable as a number, `without` if it is unset; UserError if it holds anything else."""
    text = os.environ.get(name)
    if text is None:
        return without
    if not re.fullmatch(r"[0-9]{1,6}", text.strip()) or int(text) < without:
        raise UserError(
            f"the environment variable {name} is {show(text)}; launchers set it to a whole number, {without} or more. "
            "Unset it, and start ranks with `dlrm-autoshard train` or torchrun."
        )
    return int(text)
