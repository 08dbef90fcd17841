"""What is written past the page cache is what was given, wherever it is written and in whatever pieces."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard.training.checkpoints import tensor_file
from dlrm_autoshard.training.checkpoints.tensor_file import DirectFile

PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tensor_file, "_BUFFER", 2 * PAGE)
    yield


def some_bytes(count: int) -> bytes:
    return np.random.default_rng(count).bytes(count)


def written(path: Path, pieces: list[bytes]) -> bytes:
    with DirectFile(path) as out:
        for piece in pieces:
            out.write(memoryview(piece))
    return path.read_bytes()


LENGTHS = st.lists(
    st.one_of(st.integers(0, 5 * PAGE), st.sampled_from([1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 4 * PAGE])), max_size=6
)


@given(lengths=LENGTHS)
@settings(max_examples=50, deadline=None)
def test_a_file_has_the_bytes_that_it_was_given(lengths: list[int]) -> None:
    pieces = [some_bytes(length) for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        assert written(Path(folder) / "file", pieces) == b"".join(pieces)


def test_a_file_that_is_there_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(some_bytes(9 * PAGE))
    assert written(tmp_path / "file", [b"short"]) == b"short"


def pages_in_the_cache(path: Path) -> int:
    """As mincore(2) counts them: a read that must not wait starts one of the disk, and may find what it brought."""
    length = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), length) as mapped:
        found = (ctypes.c_ubyte * -(-length // PAGE))()
        first = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(length), found)
        del first  # mapped cannot close while anything points into it
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return sum(page & 1 for page in found)


def test_its_bytes_are_not_in_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "cached").write_bytes(some_bytes(4 * PAGE))
    assert pages_in_the_cache(tmp_path / "cached") == 4
    with DirectFile(tmp_path / "file") as out:
        out.write(memoryview(some_bytes(4 * PAGE)))
    try:
        os.close(os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            pytest.skip("this file system has no direct reads and writes")
        raise
    assert pages_in_the_cache(tmp_path / "file") == 0


@pytest.mark.parametrize("flag", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_direct_writes_has_it_too(
    flag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def none_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(flag, os.strerror(flag))
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", none_direct)
    assert written(tmp_path / "file", [some_bytes(5 * PAGE + 3)]) == some_bytes(5 * PAGE + 3)


def test_a_write_that_ends_within_a_block_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a signal interrupts may; what is left of the block no direct write takes."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, bytes(data[: PAGE // 2 + 1])))
    assert written(tmp_path / "file", [some_bytes(5 * PAGE + 3)]) == some_bytes(5 * PAGE + 3)


def test_a_file_that_grows_too_large_says_so(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * PAGE, before[1]))
        with pytest.raises(OSError, match="File too large"):
            written(tmp_path / "file", [some_bytes(20 * PAGE)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    open_files = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if fd.isdigit() and os.path.exists(f"/proc/self/fd/{fd}")
    ]
    assert str(tmp_path / "file") not in open_files
