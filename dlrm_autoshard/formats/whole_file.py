"""Writes files atomically: after a crash a file holds all of its new content or all of its old.

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
    """Writes a text file atomically and creates its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(text.encode())


def no_link(path: str, flags: int) -> int:
    """Opens without following a symbolic link, for `open(opener=...)`; OSError if the path is one."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that replaces `path` when the block ends without error; otherwise `path` stays as it was.

    Symbolic links at `path` or its draft are replaced, not followed."""
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
