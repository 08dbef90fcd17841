"""One rank's tensors in one file, chunk by chunk, straight from and into the tensors' own memory.

saved = write_tensors(draft / "rank_00000.bin", tensors)        # {"dense.w": SavedTensor(...)}, the file on disk
read_tensors(checkpoint, manifest, tensors)                     # in place, each chunk checked as it arrives
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from dlrm_autoshard.train.digest import digest_of
from dlrm_autoshard.train.manifest import Chunk, DamagedCheckpoint, Manifest, SavedTensor

CHUNK = 16 << 20
"""Bytes at most: of a GPU's tensor so much is on its way through the host; of the host's own tensors nothing."""
_READERS = 4


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, SavedTensor]:
    """Writes and waits until it is on disk. OSError where it cannot be written."""
    saved, offset = {}, 0
    with open(file, "wb", buffering=0) as out:
        for name, tensor in tensors.items():
            chunks = []
            for part in _bytes_of(tensor).split(CHUNK):
                data = memoryview(part.cpu().numpy().data)
                written = 0
                digest = digest_of(data)
                while written < len(data):
                    written += out.write(data[written:])
                chunks.append(Chunk(file=file.name, offset=offset, bytes=len(data), digest=digest))
                offset += len(data)
            saved[name] = SavedTensor(
                dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape), chunks=chunks
            )
        os.fsync(out.fileno())
    return saved


def read_tensors(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """DamagedCheckpoint names the file that is not what was written; some tensors may hold its contents by then."""
    jobs: list[tuple[Chunk, Tensor]] = []
    for name, tensor in tensors.items():
        flat, start = _bytes_of(tensor), 0
        for chunk in manifest.tensors[name].chunks:
            jobs.append((chunk, flat[start : start + chunk.bytes]))
            start += chunk.bytes
        if start != len(flat):
            raise DamagedCheckpoint(f"checkpoint '{path}': '{name}' has {start} bytes, not {len(flat)}.")
    with ExitStack() as opened, ThreadPoolExecutor(_READERS) as readers:
        files = {}
        for file in {chunk.file for chunk, _ in jobs}:
            try:
                files[file] = opened.enter_context(open(path / file, "rb", buffering=0)).fileno()
            except OSError as error:
                raise DamagedCheckpoint(f"checkpoint file '{path / file}': {error.strerror}.") from error
        for done in [readers.submit(_read, path, manifest, files[chunk.file], chunk, part) for chunk, part in jobs]:
            done.result()


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
