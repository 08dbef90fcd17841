"""Reads YAML strictly: 1e-3 is a number, no duplicate keys, bounded size after expanding aliases.

parse_yaml("train: {lr: 1e-3}")            # {"train": {"lr": 0.001}}
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from dlrm_autoshard.formats.json_file import FormatError, NotReadable, read_bytes, text_of

MOST_BYTES = 2**20
_MOST_NODES = 2**20  # each alias counted as often as it is used


_REMEDIES = {
    r"found character '\t'": "indent by blanks, not by tabs",
    "mapping values are not allowed here": "is the line indented as its neighbours are? text with ': ' needs quotes",
    "found another document": "one '---' at most",
    "that cannot start any token": "text that begins so needs quotes",
    "could not determine a constructor": "no tags such as !!python are read",
    "found '<stream end>'": "something is open at the end; a shell cuts what has blanks unless it is in quotes",
}
"""PyYAML's message -> what to do about it."""


class _Loader(yaml.SafeLoader):
    """Mends YAML 1.1, which reads 1e-3 as a string and lets the last of two equal keys win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # `<<: *base` adds only keys that this mapping lacks
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is there twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Refuses integers that Python cannot print, in any of YAML's bases."""
        try:
            value: int = super().construct_yaml_int(node)
            str(value)
        except ValueError as error:
            raise NotReadable("holds a number of over 4,300 digits, or one that cannot be read") from error
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: Path, what: str) -> Any:
    """Reads a YAML file. what: the file's role, for messages."""
    try:
        return parse_yaml(text_of(read_bytes(path, what, MOST_BYTES)))
    except NotReadable as error:
        raise FormatError(f"{what} '{path}' {error}.") from error


def parse_yaml(text: str) -> Any:
    """Parses YAML; None if it is empty. NotReadable names line and column."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _num_nodes(node, {}) > _MOST_NODES:
            raise NotReadable("its aliases (*name) stand for more than a million values")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        said = str(getattr(error, "problem", None) or error).strip()
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        said = said.partition("\n")[0]
        remedy = next((f" ({remedy})" for words, remedy in _REMEDIES.items() if words in said), "")
        raise NotReadable(f"is not YAML: {where}{said}{remedy}") from error
    except RecursionError as error:
        raise NotReadable("nests its values too deeply") from error
    except NotReadable:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:  # a bad date, number or tag
        raise NotReadable(f"holds a value that cannot be read ({error})") from error


def flat(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ('train.epochs', 3) for every key of nested sections; FormatError if `section` is not a mapping."""
    if not isinstance(section, Mapping):
        raise FormatError("it has no sections")
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _num_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """Counts the document's values with aliases expanded; a node that contains itself counts as endless."""
    if id(node) not in known:
        known[id(node)] = _MOST_NODES
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        nested = [] if isinstance(node, yaml.ScalarNode) else inner
        known[id(node)] = 1 + sum(_num_nodes(part, known) for part in nested)
    return known[id(node)]
