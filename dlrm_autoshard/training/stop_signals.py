"""Ctrl-C, a scheduler's SIGTERM, a lost terminal's SIGHUP: the ranks finish the step they are in, write a checkpoint
and end.

with signals.postponed():                    # between steps only, so that what is saved is whole
    dense.stop_asked = signals.received is not None
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

# Not every rank is sent the signal, and ranks that stop at different steps would wait for each other forever. So the
# wish to stop travels with the dense gradients of every step: all ranks read the same sum, and stop after the same
# step.

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """Somebody asked this job to end, by the signal of that number."""

    def __init__(self, number: int, how_far: str = "before training began.") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {how_far}")
        self.number = number


class StopSignals:
    """While open, signals raise `Stopped`: at once, or where `postponed`, when the caller has looked at `received`."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._postponed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        taken = [n for n in _SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]  # it is by nohup
        if threading.current_thread() is not threading.main_thread():
            taken = []  # only the main thread may take signals: the program has its own way to stop
        self._before = {number: signal.signal(number, self._handle) for number in taken}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == self.received == signal.SIGHUP:
            return  # a lost terminal sends it by several ways: nobody has lost patience
        again, self.received = self.received is not None, number
        if again or not self._postponed:
            raise Stopped(number)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """In here a first signal only sets `received`; a second one raises. So it stays after an error, which ends the
        job: torchrun may be ending it too."""
        before, self._postponed = self._postponed, True
        yield
        self._postponed = before
