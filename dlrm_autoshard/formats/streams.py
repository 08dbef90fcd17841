"""Wraps text streams so that failed writes do not end training: the terminal, pipe or disk may be gone.

print(text, file=unfailing(sys.stderr), flush=True)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, TextIO, cast


def unfailing(stream: TextIO | None) -> TextIO:
    """Returns a stream that drops text it cannot write. stream: None if Python found the standard stream closed."""
    if isinstance(stream, _Unfailing):
        return cast(TextIO, stream)
    return cast(TextIO, _Unfailing(stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")))


class _Unfailing:
    """A text stream that drops text it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    def isatty(self) -> bool:
        return not self._stream.closed and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            pass
        except ValueError:
            if not self._stream.closed:  # text that the stream's encoding cannot represent
                raise
