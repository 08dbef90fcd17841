"""Files that are whole, whenever a process or the machine stops.

write_whole(run / "result.json", text)
with whole_file(out) as file: np.save(file, array)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, text: str) -> None:
    """Writes a text file whole or not at all; its folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(text.encode())


def no_link(path: str, flags: int) -> int:
    """An `opener` for `open` that follows no link: an OSError where there is one."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Holds all that is written to it or, in a crash or where the disk is full, what was there before. A link in its
    place, or in its draft's, is replaced, not followed."""
    draft = path.with_name(f".{path.name}.new")
    try:
        if draft.is_symlink():
            draft.unlink()
        with open(draft, "w+b", opener=no_link) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
