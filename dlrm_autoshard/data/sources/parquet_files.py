"""Finds the parquet files of `data.train`, `val` and `test`: paths, folders, `~`, `file://`, patterns with `**`.

parquet_files(["~/clicks/**/*.parquet"], "data.train")      # ['/home/me/clicks/a.parquet', ...], by name
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlrm_autoshard.data.batch import Split
from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.local_path import local_path

_SUFFIXES = (".parquet", ".parq", ".pq")


def parquet_files(names: Sequence[str], key: str) -> list[str]:
    """Returns the files in the order of the names, sorted within a folder or pattern. DataError if a name matches none.

    key: the config's key, for messages."""
    return [path for name in names for path in _files(name, key)]


def _files(name: str, key: str) -> list[str]:
    path = _local(name, key)
    if os.path.isdir(path):
        if not (inside := _in_folder(path)):
            raise DataError(
                f"{key}: the folder '{path}' has no file that ends in {', '.join(_SUFFIXES)}. Name other files by a "
                f"pattern, such as {path.rstrip('/')}/*."
            )
        return inside
    if os.path.exists(path):  # before patterns: there may be a file `clicks[1].parquet`
        return [path]
    found = glob.glob(path, recursive=True)
    # A matching folder stands for its files, which `**` matches as well.
    files = {file for match in found for file in (_in_folder(match) if os.path.isdir(match) else [match])}
    if not files:
        raise DataError(f"{key}: there is no file '{name}'.")
    return sorted(files)


def _local(name: str, key: str) -> str:
    """Returns the local path of a path with `~` or a `file://` URL."""
    if "\0" in name:
        raise DataError(f"{key}: {name!r} is not a file name.")
    try:
        return local_path(name)
    except UserError as error:
        raise DataError(f"{key}: '{name}' is {error}.") from error


def _in_folder(folder: str) -> list[str]:
    """Returns its parquet files at any depth, except names with `.` or `_` in front, such as Spark's unfinished
    ones."""
    found = sorted(glob.glob(os.path.join(glob.escape(folder), "**", "*"), recursive=True))  # follows links
    return [path for path in found if path.lower().endswith(_SUFFIXES) and os.path.isfile(path) and _own(path, folder)]


def _own(path: str, folder: str) -> bool:
    return not any(part.startswith("_") for part in Path(path).relative_to(folder).parts)


def check_trained_on_once(paths: Mapping[Split, Sequence[str]]) -> None:
    """Raises DataError if a split names a file twice, or training shares a file with another split."""
    seen: dict[Split, set[str]] = {split: set() for split in paths}
    for split in paths:
        for path in paths[split]:
            real = os.path.realpath(path)
            if split != "train" and real in seen["train"]:
                raise DataError(
                    f"data.train and data.{split} both name '{path}': metrics would cover samples that were trained "
                    "on. Remove it from one."
                )
            if real in seen[split]:
                raise DataError(f"data.{split} names '{path}' twice. Remove it from one pattern.")
            seen[split].add(real)
