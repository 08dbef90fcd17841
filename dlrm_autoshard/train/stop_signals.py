"""Ctrl-C, and a scheduler's SIGTERM: the ranks finish the step they are in, write a checkpoint and end.

    with StopSignals() as signals, Runtime.start(...) as runtime:
        signals.agree_through(runtime.store)
        with signals.postponed():                    # between steps only, so that what is saved is whole
            while not signals.due(step): step = train(step)

torchrun passes a signal on to every rank, but each notices it at its own moment, and ranks that stop at different steps
would wait for each other forever. So the first to notice writes down a step that nobody can have passed yet: ranks meet
in every step, so they are never more than one apart. Ranks that were not told pay one `if` a step.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from torch.distributed import Store

_STEPS_AHEAD = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Somebody asked this job to end, by the signal of that number."""

    def __init__(self, number: int, how_far: str = "before training began.") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {how_far}")
        self.number = number


class StopSignals:
    """While open, signals raise `Stopped`: at once, or where `postponed`, when the caller asks."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._postponed = False
        self._store: Store | None = None
        self._before: dict[int, Any] = {}

    def agree_through(self, store: Store | None) -> None:
        """The ranks' common store, of this start of the job only; none where there is one rank."""
        self._store = store

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.received = self.received is not None, number
        if again or not self._postponed:
            raise Stopped(number)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """In here a signal waits for `due`; a second one does not."""
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False

    def due(self, step: int) -> bool:
        """Whether the ranks end before this step."""
        if self.received is None:
            return False
        if self._store is None:
            return True
        return step >= int(self._store.compare_set("stop_before_step", "", str(step + _STEPS_AHEAD)))
