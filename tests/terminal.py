"""Replaces standard error by a pseudo-terminal, and keeps what was written to it."""

from __future__ import annotations

import os
import pty
import sys
import threading

import pytest


class Terminal:
    """`with Terminal() as terminal: ...` makes it standard error; `terminal.said` is then what was written to it."""

    said = ""

    def __enter__(self) -> Terminal:
        self._ours, theirs = pty.openpty()
        self._bytes, self._stream = b"", os.fdopen(theirs, "w", buffering=1)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(sys, "stderr", self._stream)
        self._patch.setenv("TERM", "xterm")
        self._patch.setenv("COLUMNS", "100")
        return self

    def _read(self) -> None:
        while True:
            try:
                self._bytes += os.read(self._ours, 4096)
            except OSError:  # nobody writes any more
                return

    def __exit__(self, *raised: object) -> None:
        self._patch.undo()
        self._stream.close()
        self._reader.join(5)
        os.close(self._ours)
        self.said = self._bytes.decode()
