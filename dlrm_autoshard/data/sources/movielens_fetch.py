"""Fetches MovieLens-100K by pip: the wheel of recbole contains it.

    fetch_movielens(Path("data/movielens-100k"))     # True if it was fetched, False if it was there already

Its licence does not allow us to redistribute it, so it is fetched.
"""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dlrm_autoshard.data.errors import DataError

FILES = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")
WHEEL = "recbole==1.2.1"
RETRIES = 2
_FOLDER = "recbole/dataset_example/ml-100k"


def fetch_movielens(directory: Path) -> bool:
    """Puts the three files into `directory`, each complete or not at all. DataError says what went wrong."""
    if all((directory / name).is_file() for name in FILES):
        return False
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # On the same disk as the target, so that moving a file into place is atomic.
        with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as scratch:
            _unpack(_download(Path(scratch)), Path(scratch))
            for name in FILES:
                (Path(scratch) / name).replace(directory / name)
    except OSError as error:
        hint = "Free about 10 MB there" if error.errno == errno.ENOSPC else "Check the folder"
        raise DataError(
            f"MovieLens-100K could not be put into '{directory}': {error.strerror or error}. {hint}, or set data.dir."
        ) from error
    return True


def _download(scratch: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", str(RETRIES), "--timeout", "20"]
    download = [*pip, "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    result = subprocess.run(download, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        said = [line for line in result.stderr.splitlines() if line.strip()] or ["nothing"]
        last = next((line for line in said if line.startswith("ERROR")), said[-1])
        raise DataError(
            f"MovieLens-100K could not be fetched: `pip download {WHEEL}` ended with {result.returncode} and said "
            f"'{last.strip()}'. Check the network and try again, or put {', '.join(FILES)} into data.dir by hand."
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in FILES:
                (scratch / name).write_bytes(archive.read(f"{_FOLDER}/{name}"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"The wheel of {WHEEL} does not hold the files ({error}). Try again.") from error
