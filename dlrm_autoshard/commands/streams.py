"""Standard streams that end no training. A terminal may be gone, a pipe's reader may have left, a disk may be full: the
records have all that is said, so text that a stream does not take is dropped.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class _Unfailing:
    """A text stream whose writes do not fail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            pass
        except ValueError:
            if not self._stream.closed:  # text that the stream's encoding lacks
                raise


def keep_training_without_output() -> None:
    """Makes this process's standard streams such, and opens those that are closed: else the next file that is opened,
    a checkpoint perhaps, takes their number, and what C libraries print is written to it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Unfailing):
            setattr(sys, name, cast(TextIO, _Unfailing(stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))))
