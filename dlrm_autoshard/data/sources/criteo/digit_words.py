"""Numbers from text, many fields at once: a field's last eight characters are one 64-bit word.

The digits of a word are summed within it: neighbours first, then pairs, then fours, three steps for a whole array of
fields: 0 0 0 0 1 2 3 4  ->  00 00 12 34  ->  0000 1234  ->  1234. A field shorter than eight characters is filled up
with zeros; those that are longer, or hold anything but digits, are returned as odd, for the caller to judge.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EDGE = 8
"""The text must begin with so many bytes that belong to no field: the eight before a first field's end are read."""

_MINUS = ord("-")


def _each_byte(value: int) -> np.uint64:
    return np.uint64(value * 0x0101010101010101)


_ZEROS = _each_byte(ord("0"))
_LOW, _LETTER, _LOWER_CASE, _BIT_4 = _each_byte(0x0F), _each_byte(1), _each_byte(0x20), _each_byte(0x10)
_BYTES_2, _BYTES_4, _BYTES_8 = (np.uint64(mask) for mask in (0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0xFFFFFFFF))
_4, _6, _8, _16, _32 = (np.uint64(number) for number in (4, 6, 8, 16, 32))


def read_decimal(
    text: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Integers with or without a minus, empty fields as 0; and the flat places of fields that are something else."""
    negative = (text[starts] == _MINUS) & (ends > starts)
    lengths = ends - starts - negative
    words = _words(text, ends, lengths)
    digits = words & _LOW
    # A digit is 0x30 to 0x39: the high half is 3, and adding 6 to the low half does not reach the bit above.
    odd = (words ^ digits ^ _ZEROS) | ((digits + _each_byte(6)) & _BIT_4)
    digits = (digits * np.uint64(10) + (digits >> _8)) & _BYTES_2
    digits = (digits * np.uint64(100) + (digits >> _16)) & _BYTES_4
    digits = (digits * np.uint64(10_000) + (digits >> _32)) & _BYTES_8
    numbers = digits.astype(np.int32)
    np.negative(numbers, out=numbers, where=negative)
    return numbers, np.flatnonzero((odd != 0) | (lengths > 8) | (negative & (lengths == 0)))


def read_hexadecimal(
    text: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Up to eight hexadecimal digits in either case, empty fields as 0; and the flat places of odd fields."""
    lengths = ends - starts
    words = _words(text, ends, lengths)
    low, letter = words & _LOW, (words >> _6) & _LETTER
    # "0" to "9" is 0x30 to 0x39, "a" to "f" is 0x61 to 0x66: what the low half and the letter bit say must be all.
    odd = (words | _LOWER_CASE) ^ (_ZEROS + low + letter * np.uint64(0x30))
    odd |= (low + letter * np.uint64(3) + _each_byte(6)) & _BIT_4  # beyond 9 or f
    odd |= letter & ~((low + _LOW) >> _4)  # letters begin at low half 1
    digits = low + letter * np.uint64(9)
    digits = ((digits << _4) | (digits >> _8)) & _BYTES_2
    digits = ((digits << _8) | (digits >> _16)) & _BYTES_4
    digits = (digits << _16) | (digits >> _32)
    return digits.astype(np.uint32), np.flatnonzero((odd != 0) | (lengths > 8))


def _words(text: NDArray[np.uint8], ends: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Each field's last eight characters as a little-endian word, with "0" before the field's first."""
    anywhere = np.ndarray((len(text) - 7,), "<u8", buffer=text, strides=(1,))  # overlapping words, one a byte
    words = anywhere[ends - 8]
    filled = np.clip(lengths, 0, 8).astype(np.uint64) << np.uint64(3)
    cleared = np.uint64(64) - filled
    # numpy defines a shift by all 64 bits as 0, which is what an empty field needs.
    return ((words >> cleared) << cleared) | (_ZEROS >> filled)
