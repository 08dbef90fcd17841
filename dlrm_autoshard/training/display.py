"""Shows rank 0's progress: a bar in a terminal, otherwise occasional lines.

Lines go through Python's logger `dlrm_autoshard`; add a handler to it to send them elsewhere, too.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dlrm_autoshard.formats.streams import unfailing
from dlrm_autoshard.formats.words import duration

LOG = logging.getLogger("dlrm_autoshard")


class _OnConsole(logging.Handler):
    """Prints log lines above the progress bar; wraps them in a terminal only."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), markup=False, soft_wrap=not self._console.is_terminal)


class Display:
    """Shows progress: `with Display(active, total_steps, first_step) as display: display.step(loss)`."""

    def __init__(self, active: bool, total_steps: int, done: int = 0, level: str = "info") -> None:
        """level: lines below it are not shown."""
        self.console = Console(file=unfailing(sys.stdout), quiet=not active, soft_wrap=True, highlight=False)
        self._handler = _OnConsole(self.console) if active else logging.NullHandler()
        self._total_steps, self._first_done = total_steps, done
        self._last_done, self._last_time = done, time.perf_counter()
        self._apart = self._apart_before = 0.0  # seconds without training: since the last line, and before it
        LOG.setLevel(level.upper())
        self._bar: Progress | None = None
        if active and self.console.file.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self.console,
                refresh_per_second=2,  # drawn by a thread on rank 0's core, which takes time from the step
            )
            self._task = self._bar.add_task("training", total=total_steps, completed=done, note="")

    def __enter__(self) -> Display:
        LOG.addHandler(self._handler)
        LOG.propagate = False  # libraries that training imports add handlers to the root logger
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        LOG.removeHandler(self._handler)
        LOG.propagate = True

    def step(self, loss: float | None = None) -> None:
        if self._bar is not None:
            note = {} if loss is None else {"note": f"loss {loss:.4f}"}
            self._bar.update(self._task, advance=1, **note)  # type: ignore[arg-type]

    def line(self, text: str) -> None:
        LOG.info(text)

    def exclude(self, seconds: float) -> None:
        """Leaves out seconds spent between two steps, such as on an evaluation."""
        self._apart += seconds

    def progress(self, done: int, loss: float, batch_size: int) -> float:
        """Returns examples/s since the last call. Without a bar, prints a line whose eta assumes as much time between
        steps as so far.

        done: steps. batch_size: over all ranks.
        """
        now = time.perf_counter()
        seconds_a_step = (now - self._last_time - self._apart) / max(1, done - self._last_done)
        apart = self._apart_before + self._apart
        self._last_done, self._last_time, self._apart_before, self._apart = done, now, apart, 0.0
        speed = batch_size / max(seconds_a_step, 1e-9)
        if self._bar is None:
            apart_a_step = apart / max(1, done - self._first_done)
            left = duration((self._total_steps - done) * (seconds_a_step + apart_a_step))
            self.line(f"step {done} of {self._total_steps}  {speed:,.0f} examples/s  loss {loss:.4f}  eta {left}")
        return speed

    def show(self, renderable: RenderableType) -> None:
        """Prints a table at the terminal's width."""
        self.console.print(renderable, soft_wrap=False)


def describe(metrics: Mapping[str, float]) -> str:
    """Formats metrics, 'auc 0.7901  logloss 0.5512', with each task's AUC if there are several."""
    tasks = [name for name in metrics if name.startswith("auc.")]
    order = ("auc", *tasks, "logloss", "ne", "calibration", "accuracy")
    said = [f"{name} {metrics[name]:.4f}" for name in order if name in metrics]
    if bad := metrics.get("not_finite"):
        said.append(f"predictions that are not finite: {bad:,.0f}")
    return "  ".join(said)
