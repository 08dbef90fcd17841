"""Shows the progress of long work on stderr: a bar with an ETA in a terminal, else a line every ten seconds.

with progress("evaluating") as at:
    at(12, 40)                                            # 12 of 40 are done
for table in tracked(tables, len(tables), "measuring tables"): ...
with elapsing("planning", about=6.0): ...                 # work without a known amount
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeVar

from dlrm_autoshard.formats.streams import unfailing
from dlrm_autoshard.formats.words import duration

LINE_SECONDS = 10.0
"""Seconds between lines; work shorter than this prints none."""
_BAR_SECONDS = 0.5
At = Callable[[float, float | None], None]
T = TypeVar("T")


@contextmanager
def progress(doing: str, *, unit: str = "", quiet: bool = False, stream: TextIO | None = None) -> Iterator[At]:
    """Yields at(done, total), which shows the progress; total None: unknown. quiet: shows nothing. stream: default
    stderr."""
    stream = unfailing(stream or sys.stderr)
    if quiet:
        yield lambda done, total: None
    elif stream.isatty():
        with _bar(doing, unit, stream) as at:
            yield at
    else:
        yield _lines(doing, unit, stream)


def tracked(items: Iterable[T], total: int, doing: str, quiet: bool = False) -> Iterator[T]:
    """Iterates over the items and shows how many are done."""
    with progress(doing, quiet=quiet) as at:
        for done, item in enumerate(items):
            at(done, total)
            yield item


@contextmanager
def elapsing(
    doing: str, about: float | None = None, *, quiet: bool = False, stream: TextIO | None = None
) -> Iterator[None]:
    """Shows the seconds that the block has taken. about: the seconds expected, if known."""
    if quiet:
        yield
        return
    started, ended = time.perf_counter(), threading.Event()

    def watch(at: At) -> None:
        while not ended.wait(_BAR_SECONDS):
            taken = time.perf_counter() - started
            at(taken, about if about is not None and taken < about else None)

    with progress(doing, unit=" s", stream=stream) as at:
        watcher = threading.Thread(target=watch, args=(at,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


@contextmanager
def _bar(doing: str, unit: str, stream: TextIO) -> Iterator[At]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[far]}"), TimeRemainingColumn()
    # Lines printed to the same terminal meanwhile go above the bar; those redirected to a file stay in the file.
    above = unfailing(sys.stdout).isatty()
    with Progress(*columns, console=Console(file=stream), transient=True, redirect_stdout=above) as bars:
        task = bars.add_task(doing, total=None, far="")
        yield lambda done, total: bars.update(task, completed=done, total=total, far=_far(done, total, unit))


def _lines(doing: str, unit: str, stream: TextIO) -> At:
    started = last = time.perf_counter()

    def at(done: float, total: float | None) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last < LINE_SECONDS or done == total:
            return
        last = now
        left = f", eta {duration((now - started) * (total - done) / done)}" if total and done else ""
        print(f"{doing}: {_far(done, total, unit)}{left}", file=stream, flush=True)

    return at


def _far(done: float, total: float | None, unit: str) -> str:
    return f"{done:,.0f}{unit}" if total is None else f"{done:,.0f} of {total:,.0f}{unit}"
