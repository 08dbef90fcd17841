"""Long work shows how far it has come: a bar in a terminal, lines elsewhere, nothing where that is asked for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dlrm_autoshard.commands.main import main
from dlrm_autoshard.formats import progress as module
from dlrm_autoshard.formats.progress import elapsing, progress, tracked
from tests.terminal import Terminal


def test_a_terminal_has_a_bar_with_what_is_done_and_what_is_left() -> None:
    with Terminal() as terminal, progress("measuring tables") as at:
        for done in range(5):
            at(done, 20)
            time.sleep(0.15)
    said = terminal.said
    assert "measuring tables" in said and "4 of 20" in said and "━" in said and "0:00:0" in said


def test_elsewhere_there_is_a_line_now_and_then_with_an_eta(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    for _ in tracked(range(9), 9, "tables"):
        now += 4.0
    assert capsys.readouterr().err == "tables: 3 of 9, eta 24 s\ntables: 6 of 9, eta 12 s\n"


def test_short_work_and_quiet_work_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert [*tracked(range(3), 3, "tables")] == [0, 1, 2]
    assert capsys.readouterr() == ("", "")
    with Terminal() as terminal:
        assert [*tracked(range(3), 3, "tables", quiet=True)] == [0, 1, 2]
        with elapsing("planning", 5.0, quiet=True):
            pass
    assert terminal.said == ""


def test_work_that_cannot_say_how_far_it_is_shows_its_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_BAR_SECONDS", 0.05)
    for about, said in ((60.0, "planning: 0 of 60 s, eta 60 s"), (None, "planning: 0 s"), (0.01, "planning: 0 s")):
        with elapsing("planning", about):
            time.sleep(0.2)
        assert capsys.readouterr().err.splitlines()[0] == said


def test_an_error_ends_it_and_passes_through() -> None:
    with Terminal() as terminal, pytest.raises(ZeroDivisionError), elapsing("planning", 5.0):
        raise ZeroDivisionError
    assert "Traceback" not in terminal.said


@pytest.mark.parametrize("quiet", [False, True])
def test_planning_and_fitting_show_where_they_are(quiet: bool, tmp_path: Path) -> None:
    pool, tasks = str(tmp_path / "tables.json"), str(tmp_path / "tasks.json")
    json = ["--json"] if quiet else []
    assert main(["tables", "--synthetic", "12", "--rows", "1e2:1e3", "--out", pool]) == 0
    assert main(["tasks", "--tables", pool, "--tables-per-task", "4", "--count", "2", "--out", tasks]) == 0
    with Terminal() as terminal:
        fit = ["--iterations", "1", "--placements", "2", "--out", str(tmp_path / "fitted"), *json]
        assert main(["fit", "--tasks", tasks, "--devices", "2", "--costs", "simulated", *fit]) == 0
        assert main(["plan", "--tables", pool, "--devices", "2", *json]) == 0
    said = terminal.said
    assert (said == "") if quiet else ("simulated placements" in said and "planning" in said)
