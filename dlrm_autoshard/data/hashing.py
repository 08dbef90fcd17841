"""Random numbers as a function of position: independent of the reader, the chunking and numpy's version.

    uniform(mix64(np.arange(100, 200, dtype=np.uint64) * GOLDEN + key))   # draws 100 to 199 of the stream `key`

A generator would have to be advanced to read a slice; a hash of the position has no state. Reading by rank, resuming in
mid-epoch and reading twice therefore give the same samples.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 / golden ratio: an odd step that spreads successive positions over all 64 bits."""

_ONE = np.uint64(0x3FF0000000000000)  # the bits of 1.0
_MULTIPLIER_1, _MULTIPLIER_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3, _SHIFT_MANTISSA = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(12)


def key_of(*parts: int | str) -> np.uint64:
    """Returns a stream's 64-bit key from any values that identify it. (Python's hash() differs between processes.)"""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def mix64(states: Keys) -> Keys:
    """Scrambles `states` in place: equal inputs stay equal, different ones look independent.

    The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), whose stream is mix64(key), mix64(key + GOLDEN), ...
    """
    scratch = states >> _SHIFT_1
    states ^= scratch
    states *= _MULTIPLIER_1
    np.right_shift(states, _SHIFT_2, out=scratch)
    states ^= scratch
    states *= _MULTIPLIER_2
    np.right_shift(states, _SHIFT_3, out=scratch)
    states ^= scratch
    return states


def stream(key: np.uint64, first: int, last: int) -> Keys:
    """Returns draws [first, last) of a stream."""
    return mix64(np.arange(first, last, dtype=np.uint64) * GOLDEN + key)


def uniform(states: Keys) -> NDArray[np.float64]:
    """Returns reals in [0, 1) from 52 bits each, written into the mantissa of doubles; overwrites `states`."""
    states >>= _SHIFT_MANTISSA
    states |= _ONE
    reals = states.view(np.float64)
    reals -= 1.0
    return reals


def permutation(key: np.uint64, size: int) -> NDArray[np.int64]:
    """Returns a random order of range(size)."""
    return np.argsort(stream(key, 0, size), kind="stable")
