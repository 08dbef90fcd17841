"""What can have happened to a file: flipped bytes, lost ends, other values, keys twice, too deep, too large, not text.

mutated(content, is_json=True, draw=random.Random(7))        # other bytes, the same for the same seed
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 0.9, -5, 3.0, 1e308, -1e308, 10**18, 2**63, 2**64, 10**400, "", "3", "nan", "x" * 5000,
    "\x1b[31mred", "[/]", "[bold]", "../..", "\ud800", "\u202e", [], {}, [[]], [1, [2]], {"a": 1}, [None] * 40,
    float("nan"), float("inf"),
]  # fmt: skip
ODD_TEXT = [
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"NaN", b"-", b"1e999", b"9" * 5000, b"\x1b[2J", b"{", b"]", b'"', b"\n\n",
    b"\t", b",", b"[" * 3000, b'{"a":' * 3000, b"&a [*a]", b"*b", b"!!python/object:os.system ", b"2001-99-99",
    b"? [1]\n: 2\n", b"%", b"\xed\xa0\x80", b"0x", b"\r", b"<<: ",
]  # fmt: skip


def mutated(content: bytes, draw: random.Random, is_json: bool = False) -> bytes:
    """One to three changes."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        change = _other_json if is_json and draw.random() < 0.7 else draw.choice(_BYTES)
        content = change(content, draw)
    return content


def _other_json(content: bytes, draw: random.Random) -> bytes:
    """A whole file of JSON, or one line of several."""
    lines = content.split(b"\n") if content.count(b"\n{") else [content]
    place = draw.randrange(len(lines))
    try:
        value = json.loads(lines[place])
    except (ValueError, RecursionError):
        return draw.choice(_BYTES)(content, draw)
    text = json.dumps(_changed(value, draw))
    if draw.random() < 0.1 and text[:1] == "{":
        text = text[:-1] + "," + text[1:]  # every key twice
    lines[place] = text.encode()
    return b"\n".join(lines)


def _changed(value: Any, draw: random.Random) -> Any:
    """The value with one part of it, at any depth, replaced, left out, renamed or repeated."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        what = draw.random()
        rest = {k: v for k, v in value.items() if k != key}
        if what < 0.1:
            return rest
        if what < 0.15:
            return {**rest, draw.choice(("", "[/]", key.upper(), "\x1b[1m")): value[key]}
        return {**value, key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        place = draw.randrange(len(value))
        what = draw.random()
        if what < 0.1:
            return value[:place] + value[place + 1 :]
        if what < 0.2:
            return [*value, value[place]]
        return [*value[:place], _changed(value[place], draw), *value[place + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53 and draw.random() < 0.7:
        return draw.choice((value * 1000, value / 3, -value, value + 1, value * 10**9))
    return draw.choice(ODD_VALUES)


def _flip(content: bytes, draw: random.Random) -> bytes:
    if not content:
        return b"\x01"
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 4))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _flip_early(content: bytes, draw: random.Random) -> bytes:
    """Headers are where a binary file says how large it is."""
    return _flip(content[:200], draw) + content[200:]


def _truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def _insert(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content) + 1)
    return content[:place] + draw.choice(ODD_TEXT) + content[place:]


def _in_front(content: bytes, draw: random.Random) -> bytes:
    return draw.choice((b"\xef\xbb\xbf", b"\x00", b"\xff\xfe", b"\n", b"PK\x03\x04", b"\x1f\x8b")) + content


def _replace_field(content: bytes, draw: random.Random) -> bytes:
    """A field of a line of text."""
    lines = content.split(b"\n")
    place = draw.randrange(len(lines))
    separator = b"\t" if b"\t" in lines[place] else b","
    fields = lines[place].split(separator)
    fields[draw.randrange(len(fields))] = draw.choice((*ODD_TEXT, b"", b"99", b"-1", b"1.5", b"zzzz"))
    lines[place] = separator.join(fields)
    return b"\n".join(lines)


def _drop(content: bytes, draw: random.Random) -> bytes:
    first = draw.randrange(len(content) + 1)
    return content[:first] + content[first + draw.randrange(1, 60) :]


def _repeat(content: bytes, draw: random.Random) -> bytes:
    first = draw.randrange(len(content) + 1)
    last = first + draw.randrange(1, 400)
    return content[:last] + content[first:]


_BYTES: list[Callable[[bytes, random.Random], bytes]] = [
    _flip, _flip_early, _truncate, _insert, _in_front, _replace_field, _drop, _repeat,
]  # fmt: skip
