"""Finds the rank at fault when ranks wait in vain: each reports through the store, once a second, where it is.

with Heartbeats(store, rank, world_size, timeout_seconds) as heartbeats:     # a failed exchange names the rank at fault
    heartbeats.step = 312

A rank that is silent for the timeout ends the job, named with its host; so does one that died, failed or was stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from dlrm_autoshard.distributed.lookup.shared_memory import RankGone, host_id
from dlrm_autoshard.distributed.ranks.launch import complain
from dlrm_autoshard.errors import UserError

_WAITS = {"wait", "_await", "finish", "finish_oldest", "blame", "send_values", "read_late", "all_finite"}
"""Functions of distributed/ that wait for other ranks, or for a device that does."""


class RankFailure(UserError):
    """Another rank is why this one cannot go on. signal: its number, if that rank was asked to stop. said_here: that
    rank has printed the reason on this machine."""

    def __init__(self, text: str, signal: int | None = None, said_here: bool = False) -> None:
        super().__init__(text)
        self.signal, self.said_here = signal, said_here


@dataclass(frozen=True)
class Beat:
    """A sign of life. step: the current one, None before the first. busy: where in the code, None while it waits for
    other ranks."""

    rank: int
    number: int
    step: int | None
    host: str
    place: str
    process: int
    started: str
    busy: str | None

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True)
class Cause:
    """Why the job ends; the first one found counts on all ranks. signal: of a requested stop. own_words: the rank
    reports it itself."""

    text: str
    rank: int
    signal: int | None = None
    own_words: bool = False


def is_exchange_failure(error: BaseException | None) -> bool:
    """Returns whether this error, or its cause, is a failed exchange with other ranks."""
    while error is not None and not isinstance(error, UserError):  # a UserError's sentence says more than its cause
        if isinstance(error, dist.DistError | RankGone):
            return True
        if isinstance(error, ConnectionError) and _raised_by_exchange(error):  # not by a user's own service
            return True
        words = ("gloo", "connection closed by peer", "connection reset by peer")
        if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words):
            return True
        # Gloo and NCCL have many messages, and not all of them name the library.
        if type(error) is RuntimeError and any(map(_waits_for_others, _codes(error))):
            return True
        error = error.__cause__
    return False


def _raised_by_exchange(error: BaseException) -> bool:
    """Returns whether distributed/, or a library that it called, raised the error."""
    callers = [code for code in _codes(error) if not _of_a_library(code)]
    return bool(callers) and "dlrm_autoshard/distributed" in callers[-1].co_filename


def _codes(error: BaseException) -> list[CodeType]:
    """Returns the code objects that an error came through, the raising one last."""
    return [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]


def busy_at(frame: FrameType | None) -> str | None:
    """Returns where a thread is, such as 'custom.py:55 (read)'; None if it waits for other ranks."""
    named: Any = None
    while frame is not None:
        code = frame.f_code
        if _waits_for_others(code):
            return None
        if named is None and not _of_a_library(code):
            named = frame
        frame = frame.f_back
    if named is None:
        return "code of a library"
    return f"{Path(named.f_code.co_filename).name}:{named.f_lineno} ({named.f_code.co_name})"


def _waits_for_others(code: CodeType) -> bool:
    if "torch/distributed/distributed_c10d" in code.co_filename:
        return True
    return "dlrm_autoshard/distributed" in code.co_filename and code.co_name in _WAITS


def _of_a_library(code: CodeType) -> bool:
    """Returns whether the code is an installed library's other than this package."""
    return "lib/python" in code.co_filename and "dlrm_autoshard" not in code.co_filename


def start_time(process: int) -> str:
    """Returns a process's start time, which distinguishes it from later ones with its number; '' once it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


_INTERVAL = 1.0  # seconds between signs of life; at most a tenth of the timeout
_GRACE = 4.0  # seconds for a rank's main thread to end by itself once the cause is known


class Heartbeats:
    """Rank 0 watches all ranks; the others watch rank 0 and the cause that any rank found. A rank whose code holds
    Python's lock (the GIL) for 0.9 of the timeout counts as hung, because none of its threads can report."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> None:
        self.step: int | None = None
        self._rank, self._world_size, self._timeout = rank, world_size, timeout_seconds
        self._interval = min(_INTERVAL, timeout_seconds / 10)
        self._number = 0
        self._main = threading.get_ident()
        self._identity = (platform.node(), host_id(), os.getpid(), start_time(os.getpid()))
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._beats: dict[int, Beat] = {}
        self._changed: dict[int, float] = {}
        self._closed = threading.Event()
        self._answered = time.monotonic()  # the store's last answer
        self._gone: float | None = None  # when the store was lost
        self._cause: Cause | None = None  # kept, because the store may go before this rank
        if world_size > 1:
            # Separate connections, because a pending request blocks others on its connection.
            self._store, self._asking = store.clone(), store.clone()  # type: ignore[attr-defined, unused-ignore]
            self._beat()

    def __enter__(self) -> Heartbeats:
        if self._world_size > 1 or self._parent is not None:
            threading.Thread(target=self._live, name="heartbeats", daemon=True).start()
        if self._world_size > 1:
            threading.Thread(target=self._watch_the_store, name="store watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and self._world_size > 1:
                if is_exchange_failure(error):
                    try:
                        cause = self.blame(error)
                        self._let_others_read(cause)
                    except KeyboardInterrupt:  # torchrun has seen the failure, too, and ends the ranks
                        cause = self.blame(error)
                    raise RankFailure(cause.text, cause.signal, self._said_here(cause)) from error
                cause = self._leave(error)
                if isinstance(error, KeyboardInterrupt) and cause.rank != self._rank and cause.signal is None:
                    raise RankFailure(cause.text) from error  # torchrun sent the signal, to end the remaining ranks
        finally:
            self._closed.set()

    # -- this rank ---------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        for now, slept in self._ticks():
            if self._parent not in (None, os.getppid()):
                self._parent = None
                os.kill(os.getpid(), signal.SIGTERM)  # torchrun is gone, and nobody else would end this rank
            if self._world_size == 1 or self._gone is not None:
                continue  # the parent is still watched: torchrun may be what the store went with
            if slept:
                self._changed = dict.fromkeys(self._changed, now)
            try:
                self._beat()
                self._listen(now)
                self._answered = time.monotonic()
            except RuntimeError:  # the job is over, or `_watch_the_store` reports it
                self._gone = time.monotonic()

    def _ticks(self) -> Iterator[tuple[float, bool]]:
        """Yields (now, whether this process was suspended, when others' silence means nothing), once per interval."""
        before = time.monotonic()
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            yield now, now - before > 5 * self._interval
            before = now

    def _beat(self) -> None:
        self._number += 1
        beat = Beat(
            self._rank, self._number, self.step, *self._identity, busy_at(sys._current_frames().get(self._main))
        )
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def _listen(self, now: float) -> None:
        cause = self._known_cause(self._store)
        if cause is not None:
            beat = self._read(self._store, cause.rank)
            if beat is not None:
                self._beats[cause.rank] = beat
            if not self._closed.wait(_GRACE):
                self._end(cause)
            return
        for rank in range(1, self._world_size) if self._rank == 0 else (0,):
            self._changed.setdefault(rank, now)
            beat = self._read(self._store, rank)
            if beat is not None and (rank not in self._beats or beat.number != self._beats[rank].number):
                self._beats[rank], self._changed[rank] = beat, now
            elif now - self._changed[rank] > 0.9 * self._timeout - self._interval:
                self._end(self._agree(self._store, self._silent(rank, now - self._changed[rank])))

    def _silent(self, rank: int, seconds: float) -> Cause:
        beat = self._beats.get(rank)
        if beat is None:
            return Cause(f"rank {rank} did not start within {seconds:.0f} s.", rank)
        return Cause(
            f"{beat.who} hangs or is cut off: no sign of life from it for {seconds:.0f} s, the last "
            f"{self._where(beat)} (run.collective_timeout_seconds is {self._timeout:g}).",
            rank,
        )

    def _watch_the_store(self) -> None:
        """Watches the store from a thread that never asks it, because a store that hangs would block it."""
        for now, slept in self._ticks():
            orphan = self._parent is None and "TORCHELASTIC_RUN_ID" in os.environ
            if slept:
                self._answered = now
            if self._gone is not None and now - self._gone > (3 * _GRACE if orphan else _GRACE):
                self._end(self._without_store("is gone"))
            if now - self._answered > 0.9 * self._timeout:
                self._end(self._without_store(f"has not answered for {now - self._answered:.0f} s"))

    def _without_store(self, what: str) -> Cause:
        if self._cause is not None:
            return self._cause
        host = os.environ.get("MASTER_ADDR", "?")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return Cause(f"torchrun on {host}, which keeps the job's store, {what} {self._where()}.", -1)
        who = self._beats[0].who if 0 in self._beats else f"rank 0 on {host}"
        return Cause(f"{who}, which keeps the job's store, {what} {self._where()}.", 0)

    def _said_here(self, cause: Cause) -> bool:
        beat = self._beats.get(cause.rank)
        return cause.own_words and cause.signal is None and beat is not None and beat.place == self._identity[1]

    def _where(self, beat: Beat | None = None) -> str:
        """Returns where this rank, or another, is; a last beat may be old, but no rank is more than a step ahead."""
        steps = [step for step in (self.step, beat.step if beat else None) if step is not None]
        return f"at step {max(steps)}" if steps else "before the first step"

    def _end(self, cause: Cause) -> None:
        """Ends the process from a thread, because the main one may hang in an exchange."""
        beat = self._beats.get(cause.rank)
        if beat is not None and cause.rank != self._rank and beat.place == self._identity[1]:
            with contextlib.suppress(OSError):
                if start_time(beat.process) == beat.started:
                    os.kill(beat.process, signal.SIGKILL)  # so that torchrun need not wait for a hung rank
        if self._closed.is_set():
            return
        if not self._said_here(cause):
            complain(cause.text)
        self._let_others_read(cause)
        os._exit(3 if cause.signal is None else 128 + cause.signal)

    def _let_others_read(self, cause: Cause) -> None:
        """Waits until the other ranks have read the cause, if the store ends with this rank."""
        if self._rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        others = [f"told/{rank}" for rank in range(1, self._world_size) if rank != cause.rank]
        deadline = time.monotonic() + max(3.0, 5 * self._interval)
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline and not all(self._asking.check([key]) for key in others):
                time.sleep(self._interval / 5)

    # -- other ranks -------------------------------------------------------------------------------------------------

    def blame(self, error: BaseException) -> Cause:
        """Returns the cause of this rank's failed exchange."""
        deadline = time.monotonic() + max(3.0, 5 * self._interval)
        try:
            first = dict(self._all_beats())
            while time.monotonic() < deadline:
                cause = self._known_cause(self._asking)
                if cause is not None:
                    return cause
                dead = self._dead_here()
                if dead is not None:
                    return self._agree(self._asking, dead)
                time.sleep(self._interval / 5)
            last = dict(self._all_beats())
        except RuntimeError:
            return self._without_store("is gone")
        silent = [beat for rank, beat in last.items() if rank in first and beat.number == first[rank].number]
        busy = [beat for beat in last.values() if beat.busy]
        busy.sort(key=lambda beat: -1 if beat.step is None else beat.step)
        if silent:
            found = Cause(f"{silent[0].who} died or is cut off, {self._where(silent[0])}.", silent[0].rank)
        elif busy:
            found = Cause(f"{busy[0].who} hangs {self._where(busy[0])}, in {busy[0].busy}.", busy[0].rank)
        else:
            said = str(error).strip().splitlines()[-1]
            me = f"rank {self._rank} on {self._identity[0]}"
            found = Cause(f"an exchange of {me} failed {self._where()}, though all ranks live: {said}", self._rank)
        return self._agree(self._asking, found)

    def _dead_here(self) -> Cause | None:
        """Returns a cause if the process of a rank on this machine has ended."""
        for beat in self._beats.values():
            if beat.place == self._identity[1] and start_time(beat.process) != beat.started:
                return Cause(f"{beat.who} died {self._where(beat)}.", beat.rank)
        return None

    def _all_beats(self) -> Iterator[tuple[int, Beat]]:
        for rank in range(self._world_size):
            beat = self._read(self._asking, rank)
            if beat is not None and rank != self._rank:
                self._beats[rank] = beat
                yield rank, beat

    def _leave(self, error: BaseException) -> Cause:
        """Tells the others why this rank ends; returns the first cause."""
        number = getattr(error, "number", None) if isinstance(error, KeyboardInterrupt) else None
        said = str(error).strip() or type(error).__name__
        text = said if number else f"rank {self._rank} on {self._identity[0]} failed {self._where()}: {said}"
        cause = Cause(text, self._rank, number, own_words=True)
        with contextlib.suppress(RuntimeError):
            if number:  # perhaps from torchrun, which ends the others after a rank died
                dict(self._all_beats())
                cause = self._dead_here() or cause
            cause = self._agree(self._asking, cause)
            self._let_others_read(cause)
        return cause

    def _agree(self, store: dist.Store, cause: Cause) -> Cause:
        """Returns the first cause that any rank stored; without a store, what this rank knows."""
        with contextlib.suppress(RuntimeError):
            store.compare_set("cause", "", json.dumps(asdict(cause)))
            return self._known_cause(store) or cause
        return self._cause or cause

    def _known_cause(self, store: dist.Store) -> Cause | None:
        if self._cause is None and store.check(["cause"]):
            self._cause = Cause(**json.loads(store.get("cause")))
            store.set(f"told/{self._rank}", "")
        return self._cause

    def _read(self, store: dist.Store, rank: int) -> Beat | None:
        if rank not in self._beats and not store.check([f"beat/{rank}"]):
            return None
        return Beat(**json.loads(store.get(f"beat/{rank}")))
