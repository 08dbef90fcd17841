"""Turns pydantic's errors into sentences: the key, its value, and what is allowed."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

# pydantic's error type -> what is allowed. Types that are missing here keep pydantic's message.
ALLOWED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of 64 bits",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text (in quotes, if it looks like a number)",
    "list_type": "a list, such as [a, b]",
    "dict_type": "a section of 'key: value' lines",
    "greater_than": "more than {gt:,}",
    "greater_than_equal": "{ge:,} or more",
    "less_than": "less than {lt:,}",
    "less_than_equal": "at most {le:,}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 76


def sentence(key: str, detail: Mapping[str, Any], section: str = ALLOWED["dict_type"]) -> str:
    """Returns a sentence for one of pydantic's `errors()`. section: what the format at hand calls a dict."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return f"'{key}' is missing."
    if kind == "extra_forbidden":
        return f"unknown key '{key}'."
    named = f"'{key}' is" if key else "it is"
    if kind == "dict_type":
        return f"{named} {show(value)}; it must be {section}."
    if kind in ALLOWED:
        bounds = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in context.items()}
        quoted = ", without quotes" if kind in ("int_type", "float_type") and _is_quoted_number(value) else ""
        return f"{named} {show(value)}; it must be {ALLOWED[kind].format(**bounds)}{quoted}."
    said = str(detail["msg"]).removeprefix("Value error, ").rstrip(".")
    return f"{named} {show(value)}: {said[:1].lower()}{said[1:]}."


def _is_quoted_number(value: object) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def dotted(location: Sequence[str | int]) -> str:
    """Returns a key as it is written in overrides: 'train.epochs'."""
    return ".".join(str(part) for part in location if part != "[key]")


def show(value: object) -> str:
    """Returns the value's repr, shortened to 80 characters."""
    text = "empty" if value is None else _SHORT.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
