"""Parses Criteo's click logs as text, a block of lines at a time, without a Python object per field.

    blocks = read_blocks(Path("train.txt"))       # or day_0.gz, or a .csv with a header

One scan for separators finds all fields of a block; `digit_words` parses them.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.data.sources.criteo.digit_words import EDGE, read_decimal, read_hexadecimal
from dlrm_autoshard.formats.words import some_of

NUM_INTEGERS, NUM_CATEGORIES = 13, 26
NUM_COLUMNS = 1 + NUM_INTEGERS + NUM_CATEGORIES

_BLOCK_BYTES = 1 << 17  # the arrays made from it stay in the cache
_LONGEST_LINE = 1 << 16
_NEWLINE, _RETURN = b"\n"[0], b"\r"[0]
_WHAT_IS_WANTED = f"a label, {NUM_INTEGERS} integers and {NUM_CATEGORIES} hexadecimal categories"


@dataclass(frozen=True)
class TextBlock:
    """Some successive lines. file_position: bytes of the file read so far (compressed bytes for gzip)."""

    labels_B: NDArray[np.int32]
    integers_BF: NDArray[np.int32]
    categories_BT: NDArray[np.uint32]
    file_position: int


def read_blocks(path: Path, block_bytes: int = _BLOCK_BYTES) -> Iterator[TextBlock]:
    """Yields blocks in bounded memory. DataError names the file and the bad line or byte.

    A line is a label, 13 integers and 26 hexadecimal categories (`68fd1e64`), separated by tabs or commas. An empty
    field is missing and reads as 0; the label must not be empty. If line 1 begins with a word it is a header, and
    columns are found by name in any order: label, I1 to I13, C1 to C26.
    """
    first_line = 1
    separator, order = b"", list(range(NUM_COLUMNS))
    with path.open("rb") as raw:
        for text in _whole_lines(path, raw, block_bytes):
            if not separator:
                text = text.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
                separator, header = _look_at_first_line(path, text)
                if header:
                    order = _order_of(path, header.split(separator))
                text = text[len(header) :]
                first_line += bool(header)
            if text:
                block = _parse(path, text, separator[0], order, first_line, raw.tell())
                first_line += len(block.labels_B)
                yield block
    if not separator:
        raise DataError(f"'{path}' is empty; it should have lines of {_WHAT_IS_WANTED}.")


def _whole_lines(path: Path, raw: IO[bytes], block_bytes: int) -> Iterator[bytes]:
    """Yields the file's text in pieces that end with a line."""
    compressed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    stream: IO[bytes] = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if compressed else raw
    rest = b""
    while True:
        try:
            text = stream.read(block_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"'{path}' is a damaged or truncated gzip file: reading stopped near byte {raw.tell()} of it ({error})."
            ) from error
        cut = text.rfind(b"\n") + 1
        if not text:
            if rest.strip():
                yield rest + b"\n"
            return
        if cut:
            yield rest + text[:cut]
            rest = text[cut:]
        else:
            rest += text
            if len(rest) > _LONGEST_LINE:
                raise DataError(
                    f"'{path}' is not a click log: {len(rest)} bytes without a line end before byte {raw.tell()}; "
                    f"lines should be {_WHAT_IS_WANTED}."
                )


def _look_at_first_line(path: Path, text: bytes) -> tuple[bytes, bytes]:
    """Returns the separator of columns, and the header if there is one."""
    line = text[: text.index(b"\n") + 1]
    for separator in (b"\t", b","):
        fields = line.split(separator)
        if len(fields) == NUM_COLUMNS:
            return separator, line if _is_word(fields[0].strip().strip(b'"')) else b""
    columns = max(line.count(b"\t"), line.count(b",")) + 1
    raise DataError(
        f"'{path}' line 1 has {columns} columns, not {NUM_COLUMNS} ({_WHAT_IS_WANTED}) between tabs or commas."
        + (" A file without labels, such as Kaggle's test.txt, cannot be trained on." if columns == 39 else "")
    )


def _order_of(path: Path, header: Sequence[bytes]) -> list[int]:
    """Returns the position of each column in the file: the label, then integers and categories by the numbers in their
    names. DataError if the names are ambiguous."""
    names = [name.strip().strip(b'"').decode(errors="replace").lower() for name in header]
    numbered: dict[str, dict[int, int]] = {}  # prefix -> number -> position
    labels = []
    for place, name in enumerate(names):
        match = re.fullmatch(r"(.*?)([0-9]{1,3})", name)
        if match is None:
            labels.append(place)
        else:
            numbered.setdefault(match[1], {})[int(match[2])] = place
    groups = sorted(numbered.values(), key=len)
    counts = [len(labels), *map(len, groups)]
    in_a_row = all(max(places) - min(places) == len(places) - 1 for places in groups)
    if in_a_row and counts in ([1, NUM_INTEGERS, NUM_CATEGORIES], [1, NUM_COLUMNS - 1], [0, NUM_COLUMNS]):
        return [*labels, *(places[number] for places in groups for number in sorted(places))]
    raise DataError(
        f"'{path}' line 1 names columns {some_of(names, 6)}; it must name label, I1 to I13 and C1 to C26 (or int_0 to "
        "int_12 and cat_0 to cat_25), in any order. Name them so, or remove the line if that is their order."
    )


def _is_word(field: bytes) -> bool:
    """Returns whether the field is a column's name; an empty or numeric one is a label, which `_parse` checks."""
    try:
        float(field or b"0")
    except ValueError:
        return True
    return False


def _parse(
    path: Path, text: bytes, separator: int, order: Sequence[int], first_line: int, file_position: int
) -> TextBlock:
    """order: the position of each column in the file."""
    characters = np.frombuffer(bytes(EDGE) + text, np.uint8)
    is_line_end = characters == _NEWLINE
    ends = np.flatnonzero(is_line_end | (characters == separator))
    num_lines = int(is_line_end.sum())
    if len(ends) != num_lines * NUM_COLUMNS or not is_line_end[ends[NUM_COLUMNS - 1 :: NUM_COLUMNS]].all():
        raise DataError(_sentence_about_columns(path, text, bytes([separator]), first_line))
    starts = np.concatenate([[EDGE], ends[:-1] + 1])
    ends_BC, starts_BC = ends.reshape(num_lines, NUM_COLUMNS), starts.reshape(num_lines, NUM_COLUMNS)
    ends_BC[:, -1] -= characters[ends_BC[:, -1] - 1] == _RETURN
    if list(order) != list(range(NUM_COLUMNS)):
        ends_BC, starts_BC = ends_BC[:, order], starts_BC[:, order]

    split = 1 + NUM_INTEGERS
    decimal_BC, odd_decimal = read_decimal(characters, starts_BC[:, :split], ends_BC[:, :split])
    categories_BT, odd_category = read_hexadecimal(characters, starts_BC[:, split:], ends_BC[:, split:])
    for place in odd_decimal:
        line, column = divmod(int(place), split)
        field = text[starts_BC[line, column] - EDGE : ends_BC[line, column] - EDGE]
        decimal_BC[line, column] = _integer(path, field, first_line + line, order[column])
    if len(odd_category):
        line, column = divmod(int(odd_category[0]), NUM_CATEGORIES)
        field = text[starts_BC[line, split + column] - EDGE : ends_BC[line, split + column] - EDGE]
        raise DataError(
            _sentence_about_field(path, first_line + line, order[split + column], field, "hexadecimal category")
        )
    labels_B = decimal_BC[:, 0]
    bad_B = ((labels_B != 0) & (labels_B != 1)) | (starts_BC[:, 0] == ends_BC[:, 0])  # an empty one is not "no click"
    if bad_B.any():
        line = int(bad_B.argmax())
        field = text[starts_BC[line, 0] - EDGE : ends_BC[line, 0] - EDGE]
        raise DataError(_sentence_about_field(path, first_line + line, order[0], field, "label of 0 or 1"))
    return TextBlock(labels_B, decimal_BC[:, 1:], categories_BT, file_position)


def _integer(path: Path, field: bytes, line: int, column: int) -> int:
    """Parses integers that `read_decimal` could not: of nine digits and more, or written as `3.0`."""
    try:
        number = float(field)
    except ValueError:
        number = math.nan
    if not number.is_integer() or abs(number) >= 2**31:  # neither nan nor inf is an integer
        raise DataError(_sentence_about_field(path, line, column, field, "integer of 32 bits"))
    return int(number)


def _sentence_about_field(path: Path, line: int, column: int, field: bytes, wanted: str) -> str:
    shown = repr(field[:40].decode(errors="replace"))
    return f"'{path}' line {line} column {column + 1} is {shown}, which is no {wanted}. Is the file damaged?"


def _sentence_about_columns(path: Path, text: bytes, separator: bytes, first_line: int) -> str:
    lines = text.split(b"\n")[:-1]
    counts = [line.count(separator) + 1 for line in lines]
    place = next(place for place, count in enumerate(counts) if count != NUM_COLUMNS)
    byte = sum(len(line) + 1 for line in lines[:place])
    truncated = place == len(lines) - 1 and counts[place] < NUM_COLUMNS
    return (
        f"'{path}' line {first_line + place} has {counts[place]} columns, not {NUM_COLUMNS} ({_WHAT_IS_WANTED}), "
        f"{byte} bytes after line {first_line} began." + (" Is the file truncated?" if truncated else "")
    )
