"""Makes standard streams safe to lose: training goes on if the terminal or pipe they write to has gone."""

from __future__ import annotations

import os
import sys

from dlrm_autoshard.formats.streams import unfailing


def keep_training_without_output() -> None:
    """Makes this process ignore failed writes to its standard streams, and opens those that are closed.

    Otherwise the next file opened, such as a checkpoint, would get the closed stream's number, and C libraries would
    print into it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    sys.stdout, sys.stderr = unfailing(sys.stdout), unfailing(sys.stderr)
