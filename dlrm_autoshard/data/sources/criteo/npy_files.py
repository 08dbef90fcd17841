"""Writes npy files row by row and maps them, also inside an npz, so that they may be larger than memory.

with NpyWriter(Path("day_0_dense.npy"), columns=13, dtype=np.float32) as writer:
    writer.append(rows)                       # as often as needed; the header is completed at the end
map_npy(Path("day_0_dense.npy"))[5:9]
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import DTypeLike, NDArray

from dlrm_autoshard.data.errors import DataError

_HEADER_BYTES = 128
_LOCAL_HEADER_BYTES = 30  # of a zip member, before name and extra field, whose lengths are the last 4 bytes


class NpyWriter:
    """Writes an npy file row by row; the number of rows may be unknown until the end."""

    def __init__(self, path: Path, columns: int, dtype: DTypeLike) -> None:
        self._columns, self._dtype, self._rows = columns, np.dtype(dtype), 0
        self._file = path.open("wb")
        self._file.write(self._header())

    def append(self, rows: NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(rows, self._dtype).data)
        self._rows += len(rows)

    def _header(self) -> bytes:
        about = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._rows, self._columns)}
        text = repr(about).encode().ljust(_HEADER_BYTES - 11) + b"\n"
        return npy_format.magic(1, 0) + len(text).to_bytes(2, "little") + text

    def __enter__(self) -> NpyWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._file.seek(0)
            self._file.write(self._header())
        self._file.close()


def rows_of(path: Path, columns: int, dtype: DTypeLike, rows_at_a_time: int) -> Iterator[NDArray[Any]]:
    """Yields an NpyWriter's rows in pieces. Reads instead of mapping, as mapped pages count as the process's memory."""
    with path.open("rb") as file:
        file.seek(_HEADER_BYTES)
        while len(values := np.fromfile(file, dtype, rows_at_a_time * columns)):
            yield values.reshape(-1, columns)


def map_npy(path: Path) -> NDArray[Any]:
    """Maps the file's array. DataError if it is not an npy file or is shorter than its header says."""
    if not path.is_file():
        raise DataError(f"'{path}' does not exist.")
    return _map_at(path, str(path), 0, path.stat().st_size)


def map_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Maps the arrays of an uncompressed npz (`np.savez`, not `np.savez_compressed`)."""
    if not path.is_file():
        raise DataError(f"'{path}' does not exist.")
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    raise DataError(f"'{path}' is compressed, so it cannot be mapped. Save it again with numpy.savez.")
                file.seek(max(0, member.header_offset + _LOCAL_HEADER_BYTES - 4))
                lengths = file.read(4)
                if member.header_offset < 0 or len(lengths) < 4:
                    raise zipfile.BadZipFile(f"its directory places '{member.filename}' outside of it")
                name_bytes, extra_bytes = np.frombuffer(lengths, "<u2")
                offset = member.header_offset + _LOCAL_HEADER_BYTES + int(name_bytes) + int(extra_bytes)
                name = member.filename.removesuffix(".npy")
                arrays[name] = _map_at(path, f"{path}[{name}]", offset, offset + member.file_size)
    except (zipfile.BadZipFile, NotImplementedError) as error:  # the latter for unknown zip versions
        raise DataError(f"'{path}' ({path.stat().st_size} bytes) is not an npz file, or truncated: {error}.") from error
    return arrays


def _map_at(path: Path, shown: str, offset: int, end: int) -> NDArray[Any]:
    with path.open("rb") as file:
        file.seek(offset)
        try:
            version = npy_format.read_magic(file)
            read_header = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}[version]
            shape, fortran_order, dtype = read_header(file)
        except (ValueError, KeyError, EOFError, SyntaxError, RecursionError, TokenError) as error:  # Python's text
            raise DataError(f"'{shown}' is not an npy file: its header, at byte {offset}, cannot be read.") from error
        start = file.tell()
    whole = all(type(length) is int and length >= 0 for length in shape)  # isinstance would accept True
    if dtype.kind not in "biuf" or not shape or not whole or math.prod(n or 1 for n in shape) * dtype.itemsize >= 2**63:
        raise DataError(f"'{shown}' holds {dtype} {shape}; it must hold rows of numbers. Make it again.")
    wanted = math.prod(shape) * dtype.itemsize
    if end - start < wanted:
        raise DataError(
            f"'{shown}' is truncated: an array of {shape} {dtype} needs {wanted} bytes from byte {start}, but only "
            f"{max(0, end - start)} are there. Make it again."
        )
    if wanted == 0:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", start, shape, "F" if fortran_order else "C")
