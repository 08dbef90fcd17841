"""What rank 0 shows while training: one progress bar in a terminal, plain lines elsewhere; nothing on other ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """`with Display(active, total_steps, first_step) as display: display.step(loss)`."""

    def __init__(self, active: bool, total_steps: int, done: int = 0) -> None:
        self.console = Console(stderr=False, quiet=not active, soft_wrap=True, highlight=False)
        self._bar: Progress | None = None
        if active and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self.console,
                refresh_per_second=2,  # a thread on rank 0's own core draws it: seldom, for it takes from the step
            )
            self._task = self._bar.add_task("training", total=total_steps, completed=done, note="")

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, loss: float | None = None) -> None:
        if self._bar is not None:
            note = {} if loss is None else {"note": f"loss {loss:.4f}"}
            self._bar.update(self._task, advance=1, **note)  # type: ignore[arg-type]

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)

    def show(self, renderable: RenderableType) -> None:
        """A table, at the terminal's width."""
        self.console.print(renderable, soft_wrap=False)


def describe(metrics: Mapping[str, float]) -> str:
    """'auc 0.7901  logloss 0.5512', in the order people look for them."""
    order = ("auc", "logloss", "ne", "calibration", "accuracy")
    return "  ".join(f"{name} {metrics[name]:.4f}" for name in order if name in metrics)
