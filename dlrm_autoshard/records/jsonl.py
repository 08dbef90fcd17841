"""The run directory's files of records: one JSON object a line, written so that a crash loses at most the last line.

append_jsonl(run / "metrics.jsonl", {"schema": 1, "step": 50, "epoch": 0, "split": "train", "logloss": 0.61})
read_jsonl(run / "metrics.jsonl")           # [{"schema": 1, ...}]
forget_after(run, 300)                      # a run that resumes at step 300 forgets what it did beyond it
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dlrm_autoshard.errors import UserError, printable
from dlrm_autoshard.formats.json_file import NotReadable, parse_json
from dlrm_autoshard.formats.step_names import step_in

# A line counts once its newline is on disk. What follows the last newline is a torn line: reading ignores it and the
# next append writes over it. Each file has one writer.

LOG = logging.getLogger("dlrm_autoshard")
SCHEMA = 1
"""Of every record in a run directory. It grows when a key changes its meaning or goes; new keys don't change it."""


class ReportError(UserError):
    """A run directory or record that cannot be reported on: the message says which file, what is wrong, what to try."""


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Adds one line and waits until it is on disk. NaN and infinities become null: JSON has no word for them."""
    line = _line({"schema": SCHEMA, **record})
    with lost_where_full(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            file.truncate(_whole_lines_end(file))
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def lost_where_full(path: Path) -> Iterator[None]:
    """A record that a full disk does not take is lost, with a warning: training is worth more."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        LOG.warning("a record is lost: '%s' cannot be written: %s", path, error.strerror)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole lines; [] where there is no such file. ReportError names the line that is damaged or too new."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ReportError(f"'{path}' cannot be read: {error.strerror}.") from error
    *lines, _torn = text.split(b"\n")
    return [_parse(line, f"'{path}', line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def forget_after(run_dir: Path, step: int) -> None:
    """Removes records that reach beyond `step` (-1: all), which a run will make again, and later plans: the last one is
    the live one. Evaluations at `step` itself stay: those that are made again take their place (`Journal`)."""

    def is_before(record: dict[str, Any]) -> bool:
        return int(record.get("end_step", record.get("step", -1))) <= step

    for name in ("costs/*.jsonl", "metrics.jsonl", "decisions.jsonl", "plan/evidence.jsonl"):
        for path in run_dir.glob(name):
            change_jsonl(path, lambda record: record if is_before(record) else None)
    for path in run_dir.glob("plan/step_*.json"):
        of = step_in(path.stem)
        if of is not None and of > step:
            path.unlink()


def change_jsonl(path: Path, change: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> None:
    """Every record becomes what `change` makes of it, or goes where that is None; all at once or, in a crash, not."""
    records = read_jsonl(path)
    kept = [new for record in records if (new := change(record)) is not None]
    if kept == records:
        return
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "wb") as file:
        file.writelines(_line(record) for record in kept)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(_finite(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = shown(parse_json(line))
    except NotReadable as error:
        raise ReportError(f"{where} is damaged: it {error}. Remove that line to read the rest.") from error
    if not isinstance(record, dict) or type(record.get("schema")) is not int:
        raise ReportError(f"{where} is not a record: it has no 'schema' number.")
    if record["schema"] > SCHEMA:
        raise ReportError(
            f"{where} has schema {record['schema']}; this version of dlrm_autoshard reads up to {SCHEMA}. "
            "The run was made by a newer version: update dlrm_autoshard to read it."
        )
    return record


def shown(value: Any) -> Any:
    """The value with text that can be shown: a report's escape sequences are its own, never a file's."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {shown(key): shown(item) for key, item in value.items()}
    return [shown(item) for item in value] if isinstance(value, list) else value


def _whole_lines_end(file: BinaryIO) -> int:
    """Where the last newline ends: the file's size unless a crash tore its last line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
