"""Creates a folder that appears complete or not at all.

    with new_folder(Path("data/criteo")) as partial:       # data/criteo.partial; renamed at the end

Whatever stops the work, `data/criteo` never holds half of it; the next attempt removes the partial folder.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlrm_autoshard.data.errors import DataError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a draft folder that is renamed to `out` at the end; removes it if the block fails."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"'{out}' exists and is not empty. Remove it, or name another folder.")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    except OSError as error:
        hint = " Free some space there, or name another folder." if error.errno == errno.ENOSPC else ""
        raise DataError(f"'{out}' could not be written: {error.strerror or error}.{hint}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
