"""One rank's tensors in one file, chunk by chunk, without a copy of all of them.

saved = write_tensors(draft / "rank_00000.bin", tensors)        # {"dense.w": SavedTensor(...)}, the file on disk
read_tensors(checkpoint, manifest, tensors)                     # in place, each chunk checked as it arrives
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dlrm_autoshard.training.checkpoints.digest import digest_of
from dlrm_autoshard.training.checkpoints.direct_file import DirectFile
from dlrm_autoshard.training.checkpoints.manifest import (
    Chunk,
    DamagedCheckpoint,
    Manifest,
    SavedTensor,
    name_and_columns,
)

CHUNK = 16 << 20
"""Bytes at most: of a GPU's tensor so much is on its way through the host."""
_READERS = 4


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, SavedTensor]:
    """Writes and waits until it is on disk. OSError where it cannot be written."""
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
    """Where a chunk goes whose columns are not those of the tensor it is read into.

    first: number of the chunk's first element among those of its columns. Of what is kept a row, the tensor's is the
    mean of the parts that were saved, by columns.
    """

    into: Tensor
    wanted: tuple[int, int]
    saved: tuple[int, int]
    first: int

    def put(self, arrived: Tensor) -> None:
        values = arrived.view(self.into.dtype).to(self.into.device)
        (start, stop), (from_column, to_column) = self.saved, self.wanted
        if self.into.dim() == 1:
            left, right = max(start, from_column), min(stop, to_column)
            rows = self.into.detach()[self.first : self.first + len(values)]
            rows.add_(values, alpha=(right - left) / (to_column - from_column))
            return
        width, place = stop - start, self.first
        while len(values):  # a row that the chunk has a piece of, whole rows, another such row
            row, column = divmod(place, width)
            whole = column == 0 and len(values) >= width
            count = len(values) // width * width if whole else min(width - column, len(values))
            block = values[:count].view(-1, width if whole else count)
            first = start + column
            left, right = max(first, from_column), min(first + block.shape[1], to_column)
            if left < right:
                columns = slice(left - from_column, right - from_column)
                self.into.detach()[row : row + len(block), columns] = block[:, left - first : right - first]
            values, place = values[count:], place + count


def read_tensors(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """DamagedCheckpoint names the file that is not what was written; some tensors may hold its contents by then.

    tensors: of whole tables, or of columns (`tables.item[0:64].weight`), whoever wrote which columns."""
    jobs: list[tuple[Chunk, Tensor | _Cut]] = []
    for key, tensor in tensors.items():
        name, columns = name_and_columns(key)
        jobs += _jobs(f"checkpoint '{path}': '{name}'", manifest.tensors[name], tensor, columns)
    with ExitStack() as opened, ThreadPoolExecutor(_READERS) as readers:
        files = {}
        for file in {chunk.file for chunk, _ in jobs}:
            try:
                files[file] = opened.enter_context(open(path / file, "rb", buffering=0)).fileno()
            except OSError as error:
                raise DamagedCheckpoint(f"checkpoint file '{path / file}': {error.strerror}.") from error

        def read(chunk: Chunk, into: Tensor | _Cut) -> None:
            part = into if isinstance(into, Tensor) else torch.empty(chunk.bytes, dtype=torch.uint8)
            _read(path, manifest, files[chunk.file], chunk, part)
            if isinstance(into, _Cut):
                into.put(part)

        def is_sum(into: Tensor | _Cut) -> bool:
            return isinstance(into, _Cut) and into.into.dim() == 1

        for done in [readers.submit(read, *job) for job in jobs if not is_sum(job[1])]:
            done.result()
        for job in jobs:
            if is_sum(job[1]):  # whose last bit depends on the order
                read(*job)


def _jobs(
    what: str, saved: SavedTensor, tensor: Tensor, columns: tuple[int, int] | None
) -> list[tuple[Chunk, Tensor | _Cut]]:
    """Where each chunk of a saved tensor goes, of which `tensor` is these columns, or all."""
    groups: dict[tuple[int, int] | None, list[Chunk]] = {}
    for chunk in saved.chunks:
        groups.setdefault(None if chunk.columns is None else (chunk.columns[0], chunk.columns[1]), []).append(chunk)
    groups = groups or {None: []}
    ends = [own[1] for own in groups if own is not None]
    whole = (0, saved.shape[1]) if tensor.dim() == 2 else (0, max(ends, default=0))
    wanted = columns or whole
    jobs: list[tuple[Chunk, Tensor | _Cut]] = []
    missing = wanted[1] - wanted[0]
    for own, chunks in groups.items():
        start, stop = own or (whole if tensor.dim() == 2 else wanted)
        shared = max(0, min(stop, wanted[1]) - max(start, wanted[0]))
        same, row = (start, stop) == wanted, (stop - start if tensor.dim() == 2 else 1) * tensor.itemsize
        if not shared and not same:
            continue
        missing -= shared
        place, size = 0, tensor.numel() * tensor.itemsize if same else len(tensor) * row
        for chunk in chunks:
            if same:
                jobs.append((chunk, _bytes_of(tensor)[place : place + chunk.bytes]))
            else:
                jobs.append((chunk, _Cut(tensor, wanted, (start, stop), place // tensor.itemsize)))
            place += chunk.bytes
        if place != size or any(chunk.bytes % tensor.itemsize for chunk in chunks):
            raise DamagedCheckpoint(f"{what} has {place} bytes, not {size}.")
    if missing:
        raise DamagedCheckpoint(f"{what} lacks {missing} of columns {wanted[0]} to {wanted[1]}.")
    if tensor.dim() == 1 and any(isinstance(into, _Cut) for _, into in jobs):
        tensor.detach().zero_()
    return jobs


def _read(path: Path, manifest: Manifest, descriptor: int, chunk: Chunk, part: Tensor) -> None:
    host = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")

    def fill(start: int, block: memoryview) -> None:
        while len(block):
            count = os.preadv(descriptor, [block], chunk.offset + start)
            if count == 0:
                raise DamagedCheckpoint(f"checkpoint file '{path / chunk.file}' ends too early.")
            block, start = block[count:], start + count

    try:
        digest = digest_of(memoryview(host.numpy().data), fill, manifest.algorithm)
    except OSError as error:
        raise DamagedCheckpoint(f"checkpoint file '{path / chunk.file}': {error.strerror}.") from error
    if digest != chunk.digest:
        raise DamagedCheckpoint(
            f"checkpoint file '{path / chunk.file}' is damaged: bytes {chunk.offset} to "
            f"{chunk.offset + chunk.bytes} are not those that were written."
        )
    if host is not part:
        part.copy_(host)


def _bytes_of(tensor: Tensor) -> Tensor:
    """A flat view of the tensor's memory."""
    return tensor.detach().view(-1).view(torch.uint8)
