"""Standard streams that end no training: the records have all that is said."""

from __future__ import annotations

import os
import sys

from dlrm_autoshard.formats.streams import unfailing


def keep_training_without_output() -> None:
    """Makes this process's standard streams such, and opens those that are closed: else the next file that is opened,
    a checkpoint perhaps, takes their number, and what C libraries print is written to it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    sys.stdout, sys.stderr = unfailing(sys.stdout), unfailing(sys.stderr)
