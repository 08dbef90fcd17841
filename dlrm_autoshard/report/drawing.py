"""The page where a job ends: a picture that cannot be drawn is a sentence, and takes nothing from what was trained.

with drawing():                             # imports the plotting library, which training has no use for
    from dlrm_autoshard.report.html import write_html
path, sentence = last_page(run_dir, record)
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path

from dlrm_autoshard.errors import in_a_sentence
from dlrm_autoshard.records.jsonl import ReportError
from dlrm_autoshard.records.run import RunRecord


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """ReportError where the packages that draw cannot be imported."""
    try:
        importlib.import_module("altair")
    except Exception as error:  # under PYTHONOPTIMIZE=2 it lacks its own docstrings
        raise _not_here(error) from error
    try:
        yield
    except ImportError as error:
        raise _not_here(error) from error


def _not_here(error: Exception) -> ReportError:
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    return ReportError(
        f"pages are drawn by altair and vl-convert-python, which do not work here ({said}). Install them anew, and "
        "leave PYTHONOPTIMIZE unset; `dlrm-autoshard report RUN --html` draws the page then."
    )


def last_page(run_dir: Path, record: RunRecord) -> tuple[Path | None, str]:
    """Writes report.html. Returns its path, and a sentence: where it is, or why it is not."""
    try:
        record.check_reportable(run_dir)
        with drawing():
            from dlrm_autoshard.report.html import write_html

            path = write_html(run_dir, record)
    except Exception as error:  # a bug, too, ends no job that has trained
        return None, f"no report.html: {in_a_sentence(error) or f'{type(error).__name__}: {error}'}"
    return path, f"report: {path}"
