"""What is shown while training: speeds are of steps, and what is left includes what comes between them."""

from __future__ import annotations

import io
import logging
import os
import sys

import pytest
from rich.console import Console

from dlrm_autoshard.training import display as module
from dlrm_autoshard.training.display import Display


def test_an_evaluation_slows_no_step_down_and_the_eta_knows_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    shown = Display(False, total_steps=110, done=10)
    with caplog.at_level(logging.INFO, "dlrm_autoshard"):
        now += 10.0  # 20 steps of half a second
        assert shown.progress(30, 0.5, 64) == 128.0
        now += 10.0 + 20.0  # 20 more, and an evaluation
        shown.exclude(20.0)
        shown.progress(50, 0.5, 64)
        now += 10.0
        shown.progress(70, 0.5, 64)
    fast = "128 examples/s  loss 0.5000  eta"
    assert [record.message for record in caplog.records] == [
        f"step 30 of 110  {fast} 40 s",
        f"step 50 of 110  {fast} 60 s",  # half a second a step, and another of evaluations
        f"step 70 of 110  {fast} 33 s",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_line_is_broken_between_words_in_a_terminal_and_whole_elsewhere(terminal: bool) -> None:
    words = [f"word{number}" for number in range(30)]
    shown = Display(True, total_steps=1)
    shown.console = Console(file=io.StringIO(), force_terminal=terminal, width=40, soft_wrap=True)
    shown._handler = module._OnConsole(shown.console)
    with shown:
        shown.line(" ".join(words))
    lines = shown.console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert " ".join(lines).split() == words
    assert (max(map(len, lines)) <= 40) if terminal else (len(lines) == 1)


@pytest.mark.parametrize("gone", ["its reader has left", "closed", "none"])
def test_a_stream_that_is_gone_ends_no_training(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    """Also where no command has seen to it: in a program that calls `train`."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", buffering=1)
    if gone == "closed":
        with pytest.raises(OSError):
            stream.write("lost\n")
        with pytest.raises(OSError):
            stream.close()
    monkeypatch.setattr(sys, "stdout", None if gone == "none" else stream)
    with Display(True, total_steps=4) as shown:
        shown.line("step 1")
        shown.progress(1, 0.5, 64)
        shown.show("a table")
