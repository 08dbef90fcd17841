"""Writes and reads one rank's tensors in one file, in chunks, without copying all of them.

saved = write_tensors(draft / "rank_00000.bin", tensors)        # {"dense.w": SavedTensor(...)}, the file on disk
read_tensors(checkpoint, manifest, tensors)                     # in place; checks each chunk's digest
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dlrm_autoshard.tables import Shard
from dlrm_autoshard.training.checkpoints.manifest import (
    Chunk,
    DamagedCheckpoint,
    Manifest,
    SavedTensor,
    digest_of,
    name_and_shard,
)

CHUNK = 16 << 20
"""Most bytes per chunk, and of a GPU tensor on its way through the host."""
_READERS = 4
_BUFFER = 16 << 20
_ALIGNED = mmap.PAGESIZE
"""Addresses, offsets and lengths of direct writes must be multiples of the disk's block, which is at most a page."""


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, SavedTensor]:
    """Writes tensors and waits until they are on disk. OSError if they cannot be written."""
    saved, offset = {}, 0
    with DirectFile(file) as out:
        for name, tensor in tensors.items():
            chunks = []
            for part in _bytes_of(tensor).split(CHUNK):
                data = memoryview(part.cpu().numpy().data)
                digest = digest_of(data, lambda _start, block: out.write(block))
                chunks.append(Chunk(file=file.name, offset=offset, bytes=len(data), digest=digest))
                offset += len(data)
            saved[name] = SavedTensor(
                dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape), chunks=chunks
            )
    return saved


@dataclass(frozen=True)
class _Cut:
    """Copies a chunk of one shard of a table into a tensor that holds another shard.

    first: the chunk's first element within `saved`. Row-wise state is the mean of the saved column shards, weighted by
    columns. Both shards have explicit rows and columns.
    """

    into: Tensor
    wanted: Shard
    saved: Shard
    first: int

    def takes(self, elements: int) -> bool:
        """Returns whether any rows of a chunk with so many elements are wanted."""
        common = self.saved & self.wanted
        assert common is not None
        width = _width(self.saved) if self.into.dim() == 2 else 1
        first, last = self.first // width, -(-(self.first + elements) // width)
        start, stop = _clipped(common.within(self.saved)[0], last - first, first)
        return start < stop

    def put(self, arrived: Tensor) -> None:
        values = arrived.view(self.into.dtype).to(self.into.device)
        common = self.saved & self.wanted
        assert common is not None and common.columns is not None
        into = self.into.detach()[common.within(self.wanted)[: self.into.dim()]]
        rows, columns = common.within(self.saved)
        if self.into.dim() == 1:
            share = (common.columns[1] - common.columns[0]) / _width(self.wanted)
            left, right = _clipped(rows, len(values), self.first)
            into[left:right].add_(values[left + (rows.start or 0) - self.first :][: right - left], alpha=share)
            return
        width, place = _width(self.saved), self.first
        low, high = (0, width) if columns.start is None else (columns.start, columns.stop)
        while len(values):  # the end of a row, whole rows, the start of a row
            row, column = divmod(place, width)
            whole = column == 0 and len(values) >= width
            count = len(values) // width * width if whole else min(width - column, len(values))
            block = values[:count].view(-1, width if whole else count)
            left, right = max(column, low), min(column + block.shape[1], high)
            top, end = _clipped(rows, len(block), row)
            if left < right and top < end:
                first = top + (rows.start or 0) - row
                wanted = block[first : first + end - top, left - column : right - column]
                into[top:end, left - low : right - low] = wanted
            values, place = values[count:], place + count


def _clipped(wanted: slice, count: int, first: int) -> tuple[int, int]:
    """Returns the range [start, stop) within `wanted` that rows [first, first + count) cover."""
    start, stop = wanted.start or 0, wanted.stop
    return max(first - start, 0), (first + count if stop is None else min(first + count, stop)) - start


def _width(shard: Shard) -> int:
    assert shard.columns is not None
    return shard.columns[1] - shard.columns[0]


def read_tensors(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Fills tensors of whole tables, or of shards (`tables.item[0:64].weight`), whatever shards were written.

    DamagedCheckpoint names a file that has changed; some tensors may be filled by then."""
    jobs: list[tuple[Chunk, Tensor | _Cut]] = []
    for key, tensor in tensors.items():
        name, shard = name_and_shard(key)
        jobs += _jobs(f"checkpoint '{path}': '{name}'", manifest.tensors[name], tensor, shard)
    with ExitStack() as opened, ThreadPoolExecutor(_READERS) as readers:
        files = {}
        for file in {chunk.file for chunk, _ in jobs}:
            try:
                files[file] = opened.enter_context(open(path / file, "rb", buffering=0)).fileno()
            except OSError as error:
                raise DamagedCheckpoint(f"checkpoint file '{path / file}': {error.strerror}.") from error

        def read(chunk: Chunk, into: Tensor | _Cut) -> None:
            part = into if isinstance(into, Tensor) else torch.empty(chunk.bytes, dtype=torch.uint8)
            _read(path, files[chunk.file], chunk, part)
            if isinstance(into, _Cut):
                into.put(part)

        def is_sum(into: Tensor | _Cut) -> bool:
            return isinstance(into, _Cut) and into.into.dim() == 1

        for done in [readers.submit(read, *job) for job in jobs if not is_sum(job[1])]:
            done.result()
        for job in jobs:
            if is_sum(job[1]):  # in one order, on which the last bit depends
                read(*job)


def _jobs(what: str, saved: SavedTensor, tensor: Tensor, part: Shard) -> list[tuple[Chunk, Tensor | _Cut]]:
    """Returns where each chunk of a saved tensor goes. `tensor` holds this shard of it, or all."""
    groups: dict[tuple[tuple[int, int] | None, tuple[int, int] | None], list[Chunk]] = {}
    for chunk in saved.chunks:
        groups.setdefault((_pair(chunk.columns), _pair(chunk.rows)), []).append(chunk)
    groups = groups or {(None, None): []}
    width = saved.shape[1] if tensor.dim() == 2 else max([end for own, _ in groups if own for end in own], default=1)
    rows = (0, saved.shape[0] if saved.shape else 1)

    def named(columns: tuple[int, int] | None, of_rows: tuple[int, int] | None, all_columns: tuple[int, int]) -> Shard:
        return Shard.of(part.table, columns or all_columns, of_rows or rows)

    wanted = named(part.columns, part.rows, (0, width))
    jobs: list[tuple[Chunk, Tensor | _Cut]] = []
    missing = _area(wanted)
    for (columns, of_rows), chunks in groups.items():
        own = named(columns, of_rows, (0, width) if tensor.dim() == 2 else wanted.columns or (0, width))
        common = own & wanted
        if common is None and own != wanted:
            continue
        missing -= 0 if common is None else _area(common)
        elements = _area(own) if tensor.dim() == 2 else (own.rows or rows)[1] - (own.rows or rows)[0]
        place, size = 0, tensor.numel() * tensor.itemsize if own == wanted else elements * tensor.itemsize
        for chunk in chunks:
            if own == wanted:
                jobs.append((chunk, _bytes_of(tensor)[place : place + chunk.bytes]))
            elif chunk.bytes % tensor.itemsize == 0:
                cut = _Cut(tensor, wanted, own, place // tensor.itemsize)
                jobs += [(chunk, cut)] if cut.takes(chunk.bytes // tensor.itemsize) else []
            place += chunk.bytes
        if place != size or any(chunk.bytes % tensor.itemsize for chunk in chunks):
            raise DamagedCheckpoint(f"{what} has {place} bytes, not {size}.")
    if missing:
        (first, last), (start, stop) = wanted.rows or rows, wanted.columns or (0, width)
        of = f"columns {start} to {stop}" if missing % (last - first) == 0 else f"rows {first} to {last}"
        lacking = missing // (last - first) if missing % (last - first) == 0 else missing // (stop - start)
        raise DamagedCheckpoint(f"{what} lacks {lacking} of {of}.")
    if tensor.dim() == 1 and any(isinstance(into, _Cut) for _, into in jobs):
        tensor.detach().zero_()
    return jobs


def _pair(ends: list[int] | None) -> tuple[int, int] | None:
    return None if ends is None else (ends[0], ends[1])


def _area(shard: Shard) -> int:
    assert shard.rows is not None
    return (shard.rows[1] - shard.rows[0]) * _width(shard)


def _read(path: Path, descriptor: int, chunk: Chunk, part: Tensor) -> None:
    host = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")

    def fill(start: int, block: memoryview) -> None:
        while len(block):
            count = os.preadv(descriptor, [block], chunk.offset + start)
            if count == 0:
                raise DamagedCheckpoint(f"checkpoint file '{path / chunk.file}' ends too early.")
            block, start = block[count:], start + count

    try:
        digest = digest_of(memoryview(host.numpy().data), fill)
    except OSError as error:
        raise DamagedCheckpoint(f"checkpoint file '{path / chunk.file}': {error.strerror}.") from error
    if digest != chunk.digest:
        raise DamagedCheckpoint(
            f"checkpoint file '{path / chunk.file}' is damaged: bytes {chunk.offset} to "
            f"{chunk.offset + chunk.bytes} have changed since they were written."
        )
    if host is not part:
        part.copy_(host)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns a flat uint8 view of the tensor's memory."""
    return tensor.detach().view(-1).view(torch.uint8)


class DirectFile:
    """A file written from start to end past the kernel's page cache, if the file system can; on disk when its block
    ends.

    Through the cache a core copies every byte into new pages, which displace what others read: two ranks that wrote a
    GiB each took twice as long. As in FastPersist (arXiv:2406.13768).

    OSError if it cannot be written; part of it may exist then.
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
            self._file = os.open(path, flags, 0o666)  # file systems in memory or on a network may lack direct writes

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
                # The disk's blocks are larger than a page, or a partial write left an unaligned rest.
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._filled = 0

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._write_out(-(-self._filled // _ALIGNED) * _ALIGNED)
                os.ftruncate(self._file, self._size)  # removes the padding of the last block
                os.fsync(self._file)
        finally:
            os.close(self._file)
