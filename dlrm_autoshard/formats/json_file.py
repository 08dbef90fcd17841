"""Reads JSON strictly: no duplicate keys, NaN, wrong types or numbers out of range; errors name the key.

    read_json(path, PlanRecord, "plan file")   # "plan file 'p.json': 'rank_of.user' is 0.9; it must be a whole number."
    checked(PlanRecord, record)                # the same for a value in memory

Types are TypedDicts with the field types of `numbers`; a checked record is plain data.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import pydantic

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.sentences import dotted, sentence

T = TypeVar("T")
Extra: TypeAlias = Literal["forbid", "ignore", "allow"]
MOST_BYTES = 2**28
_MOST_SAID = 5


class FormatError(UserError):
    """A file is not in its format; the message names the file and the key or line."""


class NotReadable(FormatError):
    """Like FormatError, but the message is the end of a sentence about the file, such as "is not JSON (line 3)"."""


def read_json(path: Path, kind: type[T], what: str, *, extra: Extra = "forbid") -> T:
    """Reads a JSON file as a `kind`. what: the file's role, for messages. extra: how to treat keys that `kind`
    lacks."""
    try:
        value = parse_json(read_bytes(path, what))
    except NotReadable as error:
        raise FormatError(f"{what} '{path}' {error}.") from error
    try:
        return checked(kind, value, extra=extra)
    except FormatError as error:
        raise FormatError(f"{what} '{path}': {error}") from error


def read_bytes(path: Path, what: str, most: int = MOST_BYTES) -> bytes:
    """Returns the file's content; NotReadable if it has more than `most` bytes."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise NotReadable(f"cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise NotReadable(f"is larger than {most / 2**20:,.0f} MiB, more than any {what} needs")
    return content


def text_of(content: bytes) -> str:
    """Decodes UTF-8 with or without a byte order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise NotReadable(f"is not text: byte {error.start}, in line {line}, is not UTF-8") from error


def parse_json(content: bytes) -> Any:
    """Parses JSON. NotReadable names the line, or the key that is there twice."""
    try:
        text = text_of(content)
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:  # encoding fails on half of a surrogate pair, which could not be printed or saved
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except NotReadable:
        raise
    except UnicodeEncodeError as error:
        raise NotReadable("holds half of a surrogate pair (\\ud800 to \\udfff), which is not text") from error
    except json.JSONDecodeError as error:
        raise NotReadable(f"is not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from error
    except RecursionError as error:
        raise NotReadable("nests lists or objects too deeply") from error
    except ValueError as error:
        raise NotReadable("holds a number of over 4,300 digits") from error


def checked(kind: type[T], value: Any, *, extra: Extra = "forbid") -> T:
    """Returns `value` if it is a `kind`: a number is not taken for text, nor true for 1, nor 3.0 for 3.

    extra: how to treat keys that `kind` lacks."""
    try:
        found: T = _adapter(kind).validate_python(value, strict=True, extra=extra)  # type: ignore[arg-type]  # it is hashable
        return found
    except pydantic.ValidationError as error:
        raise FormatError(_sentences(error)) from None


def made(kind: type[T], record: Any) -> T:
    """Returns the dataclass that was saved as this JSON; checks types and bounds as `checked` does."""
    try:
        found: T = _adapter(kind).validate_json(json.dumps(record), strict=True)  # type: ignore[arg-type]  # it is hashable
        return found
    except pydantic.ValidationError as error:
        raise FormatError(_sentences(error)) from None


def _sentences(error: pydantic.ValidationError) -> str:
    details = error.errors()
    said = [sentence(dotted(detail["loc"]), detail, "an object, {...}") for detail in details[:_MOST_SAID]]
    more = f" And {len(details) - len(said)} more." if len(details) > len(said) else ""
    return " ".join(said) + more


@functools.cache  # building an adapter takes longer than most checks
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise NotReadable(f"has the key '{twice}' twice in one object")
    return found


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise NotReadable(f"holds {digits[:20]}, which is larger than any double")
    return number


def _no_constant(name: str) -> float:
    raise NotReadable(f"holds {name}, which is not a number in JSON")
