"""Damages files: flipped bytes, lost ends, other values, repeated keys, too deep, too large, not text.

mutated(content, is_json=True, draw=random.Random(7))        # other bytes, the same for the same seed
retyped(content, random.Random(7))                           # a parquet file with other types of columns
"""

from __future__ import annotations

import ast
import io
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
    """Returns the content with one to three changes."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        likely = _other_json if is_json else _other_npy_header if content.startswith(_NPY) else None
        change = likely if likely is not None and draw.random() < 0.7 else draw.choice(_BYTES)
        content = change(content, draw)
    return content


_NPY = b"\x93NUMPY\x01\x00"
_LENGTHS: list[Any] = [0, 1, 13, 26, 2**31, 2**62, 2**63, 2**70, -1, True, 1.0, None, "1"]
_DTYPES: list[Any] = [
    "<i4", ">i8", "<u8", "<f2", "<f8", "<f16", "|b1", "|S0", "|S4", "<U0", "<m8[s]", "<M8[D]", "<c8", "|O", "|V3",
    [("a", "<i4")], [], "", "junk", 4,
]  # fmt: skip


def _other_npy_header(content: bytes, draw: random.Random) -> bytes:
    """Returns the array with a header that contradicts it."""
    end = len(_NPY) + 2 + int.from_bytes(content[len(_NPY) : len(_NPY) + 2], "little")
    try:
        about = ast.literal_eval(content[len(_NPY) + 2 : end].decode())
        shape = list(about["shape"])
    except (ValueError, SyntaxError, KeyError, TypeError, UnicodeDecodeError):
        return draw.choice(_BYTES)(content, draw)
    what = draw.random()
    if what < 0.4:
        about["descr"] = draw.choice(_DTYPES)
    elif what < 0.6 and shape:
        shape[draw.randrange(len(shape))] = draw.choice(_LENGTHS)
    elif what < 0.8:
        shape = [draw.choice(_LENGTHS) for _ in range(draw.randrange(4))]
    else:
        about["fortran_order"] = draw.choice((True, 1, None))
    text = repr({**about, "shape": tuple(shape)}).encode() + b"\n"
    return _NPY + len(text).to_bytes(2, "little") + text + content[end:]


def retyped(content: bytes, draw: random.Random, is_json: bool = False) -> bytes:
    """Returns a parquet file with one or two columns of another type, with odd or no values, repeated, or gone."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(pa.BufferReader(content))
    for _ in range(draw.choice((1, 1, 2))):
        place = draw.randrange(table.num_columns)
        name, what = table.column_names[place], draw.random()
        if what < 0.05 and table.num_columns > 1:
            table = table.remove_column(place)
        elif what < 0.1:
            table = table.append_column(name, table.column(place))
        else:
            table = table.set_column(place, name, _odd_column(table.num_rows, draw))
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=draw.choice((7, 20, 60)))
    return out.getvalue()


def _odd_column(rows: int, draw: random.Random) -> Any:
    """Returns a column of a drawn type; most values are valid, so that some files can be read."""
    import pyarrow as pa

    whole = [draw.choice((0, 1, 1, 0, 3)) for _ in range(rows)]
    if draw.random() < 0.3:
        whole[draw.randrange(rows)] = draw.choice((-1, 100, 2**63 - 1, -(2**63)))
    some = [None if draw.random() < 0.1 else value for value in whole]
    texts = [None if value is None else draw.choice((str(value), "x", "\U0001f600")) for value in some]
    reals = [draw.choice((0.0, 1.0, 1.0, float(value))) for value in whole]
    if draw.random() < 0.3:
        reals[draw.randrange(rows)] = draw.choice((float("nan"), float("inf"), 0.5, -1.0, 1e300))
    small = [None if value is None else value % 2 for value in some]
    lists = [None if value is None else [value] * draw.randrange(3) for value in some]
    of_text = [None if word is None else [word] * draw.randrange(3) for word in texts]
    makers: list[Callable[[], Any]] = [
        lambda: pa.array(some, pa.int64()), lambda: pa.array(small, pa.int8()), lambda: pa.array(small, pa.uint64()),
        lambda: pa.array([2**64 - 1 - (value or 0) for value in small], pa.uint64()), lambda: pa.nulls(rows),
        lambda: pa.array(reals), lambda: pa.array(reals, pa.float32()), lambda: pa.array([bool(s) for s in small]),
        lambda: pa.array(small, pa.decimal128(20, 2)), lambda: pa.array(small, pa.decimal256(60, 0)),
        lambda: pa.array(texts), lambda: pa.array(texts, pa.large_string()), lambda: pa.array(texts, pa.binary()),
        lambda: pa.array(texts).dictionary_encode(), lambda: pa.array(some).dictionary_encode(),
        lambda: pa.array(lists, pa.list_(pa.int64())), lambda: pa.array(lists, pa.large_list(pa.int64())),
        lambda: pa.array([[value, value] for value in some], pa.list_(pa.int64(), 2)), lambda: pa.array([[]] * rows),
        lambda: pa.array([[value] for value in reals]), lambda: pa.array(of_text, pa.list_(pa.string())),
        lambda: pa.array([[[1]]] * rows), lambda: pa.array([{"a": 1}] * rows), lambda: pa.array([[("a", 1)]] * rows),
        lambda: pa.array(small, pa.int32()).cast(pa.date32()), lambda: pa.array(some, pa.timestamp("us")),
        lambda: pa.array(some, pa.duration("us")), lambda: pa.array([b"ab"] * rows, pa.binary(2)),
        lambda: pa.array(texts, pa.string_view()), lambda: pa.array(lists, pa.list_view(pa.int64())),
        lambda: pa.array(reals, pa.float32()).cast(pa.float16()),
    ]  # fmt: skip
    try:
        return draw.choice(makers)()
    except (pa.ArrowException, OverflowError, AttributeError):  # of values beyond the type, or an older pyarrow
        return pa.array(whole)


def _other_json(content: bytes, draw: random.Random) -> bytes:
    """Changes a JSON file, or one of its lines."""
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
    """Returns the value with a part at any depth replaced, left out, renamed or repeated."""
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
    """Flips bytes near the start, where a binary file says how large it is."""
    return _flip(content[:200], draw) + content[200:]


def _truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def _insert(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content) + 1)
    return content[:place] + draw.choice(ODD_TEXT) + content[place:]


def _in_front(content: bytes, draw: random.Random) -> bytes:
    return draw.choice((b"\xef\xbb\xbf", b"\x00", b"\xff\xfe", b"\n", b"PK\x03\x04", b"\x1f\x8b")) + content


def _replace_field(content: bytes, draw: random.Random) -> bytes:
    """Replaces a field of a line of text."""
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
