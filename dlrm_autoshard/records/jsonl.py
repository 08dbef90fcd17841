"""The run directory's files of records: one JSON object a line, written so that a crash loses at most the last line.

append_jsonl(run / "metrics.jsonl", {"schema": 1, "step": 50, "epoch": 0, "split": "train", "logloss": 0.61})

Training does not depend on records, so damage only warns: an unreadable line is skipped, and kept in
`metrics.jsonl.damaged` when the file is rewritten; a line that cannot be written is lost.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from dlrm_autoshard.errors import UserError, printable
from dlrm_autoshard.formats.json_file import NotReadable, parse_json
from dlrm_autoshard.formats.step_names import step_in
from dlrm_autoshard.formats.whole_file import no_link, whole_file
from dlrm_autoshard.formats.words import count

# A line counts once its newline is on disk. What follows the last newline is a torn line: reading ignores it and the
# next append writes over it. Each file has one writer.

LOG = logging.getLogger("dlrm_autoshard")
T = TypeVar("T")
SCHEMA = 1
"""Schema of every record in a run directory. It grows when a key changes its meaning or goes; new keys don't change it.
"""


class ReportError(UserError):
    """A run directory or record cannot be read; the message says which file, what is wrong and what to try."""


class NewerSchema(ReportError):
    """A newer version of this package wrote the record."""


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Appends one line and syncs it to disk. NaN and infinities become null, since JSON cannot express them."""
    line = _line({"schema": SCHEMA, **record})
    with lost_if_unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as file:
            file.truncate(_whole_lines_end(file))
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def lost_if_unwritable(path: Path) -> Iterator[None]:
    """Turns a failed write (full or broken disk) into a warning, so that training goes on."""
    try:
        yield
    except OSError as error:
        LOG.warning("lost a record: '%s' cannot be written: %s", path, error.strerror)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Returns all whole lines, as `read_records` does."""
    return read_records(path, lambda record: record)


def read_records(path: Path, kind: Callable[[dict[str, Any]], T]) -> list[T]:
    """Returns `kind(line)` for each complete line; [] if the file does not exist.

    Damaged lines, and lines for which `kind` raises UserError, are skipped with a warning. Raises ReportError if a
    newer version wrote a line, or the file cannot be read."""
    try:
        lines = _whole_lines(path)
    except OSError as error:
        raise ReportError(f"'{path}' cannot be read: {error.strerror}.") from error
    made, damaged = [], []
    for number, line in lines:
        try:
            made.append(kind(_parse(line)))
        except NewerSchema as error:
            raise ReportError(f"'{path}', line {number} {error}") from error
        except UserError as error:
            damaged.append((number, error))
    if damaged:
        _warn(path, damaged, "left out")
    return made


def forget_after(run_dir: Path, step: int) -> None:
    """Removes records and plans of steps after `step` (-1: all), which a resumed run writes again. Evaluations at
    `step` itself stay until they are replaced (`Journal`)."""

    def is_before(record: dict[str, Any]) -> bool:
        return int(record.get("end_step", record.get("step", -1))) <= step

    for name in ("costs/*.jsonl", "metrics.jsonl", "decisions.jsonl", "plan/evidence.jsonl"):
        for path in run_dir.glob(name):
            try:
                change_jsonl(path, lambda record: record if is_before(record) else None)
            except OSError as error:
                LOG.warning(
                    "'%s' keeps records of later steps, because it cannot be rewritten: %s", path, error.strerror
                )
    for path in run_dir.glob("plan/step_*.json"):
        of = step_in(path.stem)
        if of is not None and of > step:
            path.unlink()


def change_jsonl(path: Path, change: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> None:
    """Replaces every record by `change(record)`, or drops it if that is None, atomically. Unreadable lines move to a
    `.damaged` file beside this one."""
    records, damaged = [], []
    for number, line in _whole_lines(path):
        try:
            records.append(_parse(line))
        except UserError as error:
            damaged.append((number, error, line))
    kept = [new for record in records if (new := change(record)) is not None]
    if kept == records and not damaged:
        return
    if damaged:
        aside = path.with_name(path.name + ".damaged")
        with open(aside, "ab", opener=no_link) as file:
            file.writelines(line + b"\n" for _, _, line in damaged)
            file.flush()
            os.fsync(file.fileno())
        _warn(path, [(number, error) for number, error, _ in damaged], f"moved to '{aside}'")
    with whole_file(path) as file:
        file.writelines(_line(record) for record in kept)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(_finite(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _whole_lines(path: Path) -> list[tuple[int, bytes]]:
    """Returns the complete, non-empty lines with their numbers, from 1."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    *lines, _torn = text.split(b"\n")
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parse(line: bytes) -> dict[str, Any]:
    """Raises UserError, without file and line, unless the line is a record of this version."""
    try:
        record = shown(parse_json(line))
    except NotReadable as error:
        raise ReportError(f"it {error}") from error
    if not isinstance(record, dict) or type(record.get("schema")) is not int:
        raise ReportError("it is not a record: it has no 'schema' number")
    if record["schema"] > SCHEMA:
        raise NewerSchema(
            f"has schema {record['schema']}; this version of dlrm_autoshard reads up to {SCHEMA}. "
            "The run was made by a newer version: update dlrm_autoshard to read it."
        )
    for key in ("step", "end_step"):
        if key in record and (type(record[key]) is not int or record[key] < 0):
            raise ReportError(f"it is not a record: its '{key}' is not a number of steps")
    return record


def _warn(path: Path, damaged: Sequence[tuple[int, UserError]], what_became: str) -> None:
    number, error = damaged[0]
    first = f"line {number}" if len(damaged) == 1 else f"{count(len(damaged), 'line')}, the first line {number}"
    LOG.warning("'%s' is damaged: %s %s: %s", path, first, what_became, error)


def shown(value: Any) -> Any:
    """Returns the value with control characters in its text removed, so that no file can send escape sequences."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {shown(key): shown(item) for key, item in value.items()}
    return [shown(item) for item in value] if isinstance(value, list) else value


def _whole_lines_end(file: BinaryIO) -> int:
    """Returns the offset after the last newline: the file's size unless a crash tore its last line."""
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
