"""What is for people to fix is a sentence everywhere; a bug keeps its traceback everywhere."""

from __future__ import annotations

import errno
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import dlrm_autoshard
from dlrm_autoshard.commands import main as cli
from dlrm_autoshard.errors import UserError, in_a_sentence


def test_files_and_full_disks_are_peoples_the_rest_is_ours(tmp_path: Path) -> None:
    with pytest.raises(OSError) as missing:
        (tmp_path / "none").read_text()
    assert in_a_sentence(missing.value) == f"'{tmp_path}/none': No such file or directory."
    assert "free some disk space" in (in_a_sentence(OSError(errno.ENOSPC, "No space left on device")) or "")
    assert in_a_sentence(UserError("a sentence.")) == "a sentence."
    for bug in (ValueError("a bug"), KeyError("x"), OSError(errno.EBADF, "Bad file descriptor"), RuntimeError("x")):
        assert in_a_sentence(bug) is None


@pytest.mark.parametrize("value", ["x" * 10**7, "a b " * 10**6, "\x1b" * 10**6, "\U000e0001 " * 10**5, "/" + "y" * 350])
def test_a_sentence_is_as_long_as_people_read_whatever_it_quotes(value: str) -> None:
    said = in_a_sentence(UserError(f"line 7 of 'day_0.csv' has {value}, which is no number. Leave it out."))
    assert said is not None and len(said) <= 4000
    assert said.startswith("line 7 of 'day_0.csv' has ") and said.endswith("which is no number. Leave it out.")
    assert (value in said) == (len(value) <= 400)


def test_every_error_of_ours_that_is_a_value_error_is_for_people() -> None:
    found = []
    for module in pkgutil.walk_packages(dlrm_autoshard.__path__, "dlrm_autoshard."):
        if "benchmarks" in module.name:
            continue  # peers may be missing
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if kind.__module__ == module.name and issubclass(kind, ValueError):
                found.append(kind)
    assert len(found) > 10 and all(issubclass(kind, UserError) for kind in found), found


def test_the_command_line_shows_a_bugs_traceback_and_a_users_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("dlrm-autoshard report: ") and "is not a directory" in said and "Traceback" not in said

    def broken(arguments: object) -> int:
        raise ValueError("a bug")

    monkeypatch.setattr("dlrm_autoshard.commands.report.run", broken)
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["report", str(tmp_path)])


def test_a_reader_that_has_seen_enough_is_not_complained_about() -> None:
    """`dlrm-autoshard bench | head -1`, the pipe closed before anything is written."""
    code = "import sys, time; from dlrm_autoshard.commands.main import main; time.sleep(0.5); sys.exit(main(['bench']))"
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.stdout is not None and done.stderr is not None
    done.stdout.close()
    done.wait(timeout=60)
    assert done.stderr.read() == b""
