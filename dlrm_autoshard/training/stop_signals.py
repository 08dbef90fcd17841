"""Ends a job on Ctrl-C, a scheduler's SIGTERM or a lost terminal's SIGHUP, after the current step and a checkpoint.

with signals.postponed():                    # signals act between steps only, so that what is saved is complete
    dense.stop_asked = signals.received is not None
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

# Ranks that stop at different steps would wait for each other forever, and not every rank receives the signal. So the
# request travels with the dense gradients of every step: all ranks read the same sum and stop after the same step.

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """The job was asked to end, by the signal of that number."""

    def __init__(self, number: int, how_far: str = "before training began.") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {how_far}")
        self.number = number


class StopSignals:
    """While open, signals raise `Stopped`: at once, or in `postponed` when the caller has looked at `received`."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._postponed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        taken = [n for n in _SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]  # nohup ignores it
        if threading.current_thread() is not threading.main_thread():
            taken = []  # only the main thread may set handlers; the program has its own way to stop
        self._before = {number: signal.signal(number, self._handle) for number in taken}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == self.received == signal.SIGHUP:
            return  # a lost terminal sends SIGHUP several times; that is not a second request
        again, self.received = self.received is not None, number
        if again or not self._postponed:
            raise Stopped(number)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Makes a first signal only set `received` in the block; a second one raises. After an error it stays so, as
        the job is ending and torchrun may be ending it, too."""
        before, self._postponed = self._postponed, True
        yield
        self._postponed = before
