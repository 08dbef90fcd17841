"""Lists every key of the YAML file with type, default and meaning, as Markdown: `dlrm-autoshard configs --keys`.

A key's meaning is the comment beside or above it in its section's class.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pydantic
from pydantic_core import PydanticUndefined

from dlrm_autoshard.config import Config
from dlrm_autoshard.config_data import DataSection, Section

_HEAD = ("| key | value | default | meaning |", "| --- | --- | --- | --- |")
_FIELD = re.compile(r"    (\w+): .*?(?:  # (.*))?$")


def keys_page() -> str:
    """Returns a table per section, and per source of `data`."""
    text = ["# Keys of the YAML file", "", "Written by `dlrm-autoshard configs --keys`; a test compares the two. Units "
            "stand with the meaning; GiB are 2^30 bytes."]  # fmt: skip
    for title, section in _sections():
        rows = [f"| `{key}` | {kind} | {default} | {meaning} |" for key, kind, default, meaning in _keys("", section)]
        text += ["", f"## {title}", "", inspect.getdoc(section) or "", "", *_HEAD, *rows]
    return "\n".join(text) + "\n"


def _sections() -> Iterator[tuple[str, type[Section]]]:
    for key, field in Config.model_fields.items():
        if key == "data":
            yield "data, every source", DataSection
        for kind in _classes(field.annotation):
            source = kind.model_fields.get("source")
            yield key + ("" if source is None else f", source: {get_args(source.annotation)[0]}"), kind
    yield "beside the sections", Config


def _keys(path: str, section: type[Section]) -> Iterator[tuple[str, str, str, str]]:
    """Yields (key, value, default, meaning) of a section and its nested sections."""
    meanings, shared = _meanings(section), DataSection.model_fields if section is not DataSection else {}
    for key, field in section.model_fields.items():
        if issubclass(section, DataSection) and key in shared:
            continue
        within = _classes(field.annotation)
        if section is Config and within:
            continue  # a section of its own
        if within and not any(key in kind.model_fields for kind in within):
            entries = get_origin(field.annotation) is list
            for kind in within:
                yield from _keys(f"{path}{key}{'[]' if entries else ''}.", kind)
            if not entries and type(None) not in get_args(field.annotation):
                continue
        default = "needed" if field.is_required() else _shown(field.get_default(call_default_factory=True))
        yield f"{path}{key}", _in_words(field.annotation, field.metadata), default, meanings.get(key, "")


def _meanings(section: type) -> dict[str, str]:
    """Returns the comments of a class's own and inherited fields."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if not (issubclass(kind, Section) and kind is not Section):
            continue
        above: list[str] = []
        for line in inspect.getsource(kind).splitlines():
            field = _FIELD.match(line)
            if line.startswith("    # "):
                above.append(line.removeprefix("    # "))
            elif field:
                found[field[1]] = " ".join([*above, *filter(None, [field[2]])]).replace("|", "\\|")
                above = []
    return found


def _classes(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [kind for inner in get_args(annotation) for kind in _classes(inner)]


def _in_words(annotation: Any, metadata: Any = ()) -> str:
    """Describes a type: 'whole number >= 1, or null' for `PositiveInt | None`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _in_words(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return ", or ".join("null" if kind is type(None) else _in_words(kind, metadata) for kind in arguments)
    if origin is list:
        return f"list: {_in_words(arguments[0])}"
    if origin is dict:
        return f"mapping: {_in_words(arguments[1])}"
    names = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return " ".join([names.get(annotation, "anything"), *_bounds(metadata)])


def _bounds(metadata: Any) -> Iterator[str]:
    for one in metadata:
        for bound in one.metadata if isinstance(one, pydantic.fields.FieldInfo) else [one]:
            for kind, sign in ((annotated_types.Gt, ">"), (annotated_types.Ge, ">="), (annotated_types.Lt, "<"),
                               (annotated_types.Le, "<=")):  # fmt: skip
                if isinstance(bound, kind):
                    yield f"{sign} {getattr(bound, kind.__name__.lower()):g}"


def _shown(default: Any) -> str:
    if default is PydanticUndefined or default is None:
        return "null"
    if isinstance(default, Section):
        return "`" + str(default) + "`"
    return f"`{json.dumps(default)}`" if not isinstance(default, str) else f"`{default}`"
