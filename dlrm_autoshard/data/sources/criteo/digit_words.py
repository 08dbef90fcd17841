"""Parses many numbers of a text at once: the last eight characters of a field are one 64-bit word.

Digits are summed within the word, neighbours first, then pairs, then fours, in three steps for a whole array of fields:
0 0 0 0 1 2 3 4  ->  00 00 12 34  ->  0000 1234  ->  1234. Shorter fields are padded with zeros; fields that are longer
or hold anything but digits are returned as odd, for the caller to parse.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EDGE = 8
"""Bytes that must precede the first field, because the eight bytes before its end are read."""

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
    """Returns integers with or without a minus, empty fields as 0; and the flat indices of odd fields."""
    negative = (text[starts] == _MINUS) & (ends > starts)
    lengths = ends - starts - negative
    words = _words(text, ends, lengths)
    digits = words & _LOW
    # A digit is 0x30 to 0x39: its high half is 3, and adding 6 to its low half does not reach bit 4.
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
    """Returns numbers of up to eight hexadecimal digits in either case, empty fields as 0; and flat indices of odd
    ones."""
    lengths = ends - starts
    words = _words(text, ends, lengths)
    low, letter = words & _LOW, (words >> _6) & _LETTER
    # "0" to "9" is 0x30 to 0x39, "a" to "f" is 0x61 to 0x66: low half and letter bit must determine the byte.
    odd = (words | _LOWER_CASE) ^ (_ZEROS + low + letter * np.uint64(0x30))
    odd |= (low + letter * np.uint64(3) + _each_byte(6)) & _BIT_4  # beyond 9 or f
    odd |= letter & ~((low + _LOW) >> _4)  # letters begin at low half 1
    digits = low + letter * np.uint64(9)
    digits = ((digits << _4) | (digits >> _8)) & _BYTES_2
    digits = ((digits << _8) | (digits >> _16)) & _BYTES_4
    digits = (digits << _16) | (digits >> _32)
    return digits.astype(np.uint32), np.flatnonzero((odd != 0) | (lengths > 8))


def _words(text: NDArray[np.uint8], ends: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns each field's last eight characters as a little-endian word, padded with "0" before its first."""
    anywhere = np.ndarray((len(text) - 7,), "<u8", buffer=text, strides=(1,))  # overlapping words, one per byte
    words = anywhere[ends - 8]
    filled = np.clip(lengths, 0, 8).astype(np.uint64) << np.uint64(3)
    cleared = np.uint64(64) - filled
    # numpy defines a shift by all 64 bits as 0, as an empty field needs.
    return ((words >> cleared) << cleared) | (_ZEROS >> filled)
