"""Writes report.html when a job ends; a failure to draw it becomes a sentence and never fails the job.

with drawing():                             # imports the plotting library, which training does not need
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
    """Raises ReportError if the drawing packages cannot be imported."""
    try:
        importlib.import_module("altair")
    except Exception as error:  # with PYTHONOPTIMIZE=2 altair misses its own docstrings
        raise _not_here(error) from error
    try:
        yield
    except ImportError as error:
        raise _not_here(error) from error


def _not_here(error: Exception) -> ReportError:
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    return ReportError(
        f"drawing the page needs altair and vl-convert-python, which do not work here ({said}). Reinstall them, unset "
        "PYTHONOPTIMIZE, and run `dlrm-autoshard report RUN --html`."
    )


def last_page(run_dir: Path, record: RunRecord) -> tuple[Path | None, str]:
    """Writes report.html. Returns its path (None if that failed) and a sentence saying where it is or what failed."""
    try:
        record.check_reportable(run_dir)
        with drawing():
            from dlrm_autoshard.report.html import write_html

            path = write_html(run_dir, record)
    except Exception as error:  # not even a bug may fail a job that has trained
        return None, f"no report.html: {in_a_sentence(error) or f'{type(error).__name__}: {error}'}"
    return path, f"report: {path}"
