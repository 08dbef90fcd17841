"""A file that is written from its start to its end past the kernel's page cache, where the file system can.

with DirectFile(path) as out:
    out.write(memoryview(b"..."))       # of any length; on disk when the block ends
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

_BUFFER = 16 << 20
_ALIGNED = mmap.PAGESIZE
"""Addresses, places and lengths of direct writes are multiples of the disk's block, which is a page at most."""


class DirectFile:
    """Through the cache a core copies every byte into pages of its own, which push out what others read: two ranks that
    wrote a GiB each took twice as long. As FastPersist (arXiv:2406.13768).

    OSError where it cannot be written; it may be there in part by then.
    """

    def __init__(self, path: Path) -> None:
        self._pending = memoryview(mmap.mmap(-1, _BUFFER, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._filled = self._size = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._file = os.open(path, flags, 0o666)  # of memory, or over a network that has no such writes

    def write(self, data: memoryview) -> None:
        """data: contiguous bytes."""
        while len(data):
            count = min(len(data), _BUFFER - self._filled)
            self._pending[self._filled : self._filled + count] = data[:count]
            self._filled, self._size, data = self._filled + count, self._size + count, data[count:]
            if self._filled == _BUFFER:
                self._write_out(_BUFFER)

    def _write_out(self, length: int) -> None:
        data = self._pending[:length]
        while len(data):
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                    raise
                # Its blocks are larger, or a write that ended in the middle of one left the rest of it.
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._filled = 0

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._write_out(-(-self._filled // _ALIGNED) * _ALIGNED)
                os.ftruncate(self._file, self._size)  # what fills its last block up
                os.fsync(self._file)
        finally:
            os.close(self._file)
