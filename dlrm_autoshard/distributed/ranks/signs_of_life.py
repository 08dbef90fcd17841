"""Signs of life of a rank, and why a job ends: what heartbeats.py sends through the store and makes sentences of."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist

from dlrm_autoshard.distributed.lookup.shared_memory import RankGone
from dlrm_autoshard.errors import UserError

_WAITS = {"wait", "_await", "finish", "finish_oldest", "blame", "send_values", "read_late", "all_finite"}
"""Functions of distributed/ that wait for other ranks, or for a device that does."""


class RankFailure(UserError):
    """A rank is why this one cannot go on. signal: the number, where that rank was asked to stop. said_here: that rank
    has said so itself on this machine."""

    def __init__(self, text: str, signal: int | None = None, said_here: bool = False) -> None:
        super().__init__(text)
        self.signal, self.said_here = signal, said_here


@dataclass(frozen=True)
class Beat:
    """A sign of life. step: the step it is in, None before the first. busy: where in the code, None while it waits for
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
    """Why the job ends: the first that is found counts, on all ranks. signal: of a stop that somebody asked for.
    own_words: the rank says it itself."""

    text: str
    rank: int
    signal: int | None = None
    own_words: bool = False


def is_exchange_failure(error: BaseException | None) -> bool:
    """Whether this, or what it was raised from, is an exchange with other ranks that did not come about."""
    while error is not None and not isinstance(error, UserError):  # whose sentence says more than what it came from
        if isinstance(error, dist.DistError | RankGone):
            return True
        if isinstance(error, ConnectionError) and _raised_by_exchange(error):  # and not by a user's own service
            return True
        words = ("gloo", "connection closed by peer", "connection reset by peer")
        if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words):
            return True
        # Gloo's and NCCL's own words are many, and not all of them name themselves.
        if type(error) is RuntimeError and any(map(_waits_for_others, _codes(error))):
            return True
        error = error.__cause__
    return False


def _raised_by_exchange(error: BaseException) -> bool:
    """By distributed/, or by a library that it called."""
    callers = [code for code in _codes(error) if not _of_a_library(code)]
    return bool(callers) and "dlrm_autoshard/distributed" in callers[-1].co_filename


def _codes(error: BaseException) -> list[CodeType]:
    """Code objects that an error came through, the one that raised it last."""
    return [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]


def busy_at(frame: FrameType | None) -> str | None:
    """Where a thread is: 'custom.py:55 (read)'; None where it waits for other ranks."""
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
    """And not ours, which may be installed among them."""
    return "lib/python" in code.co_filename and "dlrm_autoshard" not in code.co_filename


def start_time(process: int) -> str:
    """Equal for one process only, also among later ones of its number; '' once it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
