"""Digests that tell a damaged chunk of a checkpoint: xxh3 where the xxhash library is there, else the slower crc32.

digest_of(bytes_of_tensor)          # "9f3c..."; which one it is, is ALGORITHM
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

_BLOCK = 1 << 18
"""Bytes taken at a time: what has just been read is still in the core's cache."""


class _Crc32:
    """Finds every single flipped bit, as xxh3 does, at a fifth of its speed."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


ALGORITHMS: dict[str, Callable[[], Any]] = {"crc32": _Crc32}
try:
    from xxhash import xxh3_64

    ALGORITHMS["xxh3_64"] = xxh3_64
except ImportError:  # installed with --no-deps, perhaps
    pass
ALGORITHM = list(ALGORITHMS)[-1]


def digest_of(data: memoryview, each: Callable[[int, memoryview], None] | None = None, algorithm: str = "") -> str:
    """each: called with every block's start and the block before that is digested: to read it, or to write it."""
    digest = ALGORITHMS[algorithm or ALGORITHM]()
    for start in range(0, len(data), _BLOCK):
        block = data[start : start + _BLOCK]
        if each is not None:
            each(start, block)
        digest.update(block)
    return str(digest.hexdigest())
