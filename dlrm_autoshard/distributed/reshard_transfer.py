"""A move's second step: weights and optimizer state travel as raw bytes, in chunks, straight to where they will live.

transfer(embeddings, in_common_order(moves, tensor_bytes(embeddings), chunk_bytes), group)
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.distributed.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.storage import state_shapes
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import Move

IN_FLIGHT = 4
"""Chunks that a rank sends or receives at a time."""


class ReshardError(UserError):
    """A move that failed half-way: this process must end, and the job starts again from its last checkpoint."""


@dataclass(frozen=True)
class Chunk:
    """Bytes [start, stop) of one tensor of a table that moves."""

    move: Move
    tensor: str
    start: int
    stop: int


def tensor_bytes(embeddings: ShardedEmbeddings) -> dict[str, dict[str, int]]:
    """Bytes of each tensor of each table, wherever it lives: {table: {weight: ..., momentum1: ...}}."""
    optimizer = embeddings.config.optimizer.name
    return {
        table.name: {
            "weight": table.weight_bytes,
            **{state: 4 * torch.Size(shape).numel() for state, shape in state_shapes(table, optimizer).items()},
        }
        for table in embeddings.tables
    }


def in_common_order(moves: Sequence[Move], sizes: dict[str, dict[str, int]], chunk_bytes: int) -> list[Chunk]:
    """All chunks of all moves, the same list on every rank: by how far each pair of ranks has come."""
    chunks_of_pair: dict[tuple[int, int], list[Chunk]] = defaultdict(list)
    for move in moves:
        for tensor, size in sizes[move.table].items():
            for start in range(0, size, chunk_bytes):
                chunk = Chunk(move, tensor, start, min(start + chunk_bytes, size))
                chunks_of_pair[move.source, move.destination].append(chunk)
    keyed = []
    for pair, chunks in chunks_of_pair.items():
        ends = list(itertools.accumulate(chunk.stop - chunk.start for chunk in chunks))
        keyed += [((end / ends[-1], pair), chunk) for end, chunk in zip(ends, chunks, strict=True)]
    return [chunk for _, chunk in sorted(keyed, key=lambda item: item[0])]


def transfer(embeddings: ShardedEmbeddings, chunks: Sequence[Chunk], group: dist.ProcessGroup) -> None:
    """group: nccl, which carries chunks from device memory to device memory, or gloo, which carries host memory.

    Why it can't deadlock: all chunks stand in one order, the same on every rank. A rank works through those that
    concern it, a few at a time, so the first unfinished chunk is always under way at both of its ends.

    Why it needs little memory on CPU: that order lets every pair of ranks progress at the same rate, and a sender gives
    back the pages of a chunk as soon as it is sent. A rank holds at most the larger of its two layouts and a few
    chunks.
    """
    rank = embeddings.rank
    views = _Views(embeddings)
    from_device = dist.get_backend(group) == "nccl"
    under_way: deque[tuple[dist.Work, Chunk, Tensor, Tensor]] = deque()

    def finish_oldest() -> None:
        work, chunk, part, carried = under_way.popleft()
        work.wait()
        if chunk.move.source == rank:
            embeddings.storage.release_part(chunk.move.table, chunk.tensor, chunk.start, chunk.stop)
        elif carried is not part:
            part.copy_(carried)

    try:
        # The tag is the chunk's number in the common order: equal at both ends by construction.
        for tag, chunk in enumerate(chunks):
            move = chunk.move
            if rank not in (move.source, move.destination):
                continue
            if len(under_way) == IN_FLIGHT:
                finish_oldest()
            part = views.bytes_of(move.table, chunk.tensor)[chunk.start : chunk.stop]
            carried = part
            if move.source == rank:
                if not from_device:
                    carried = part.cpu()  # no copy where it is in host memory already
                work = dist.isend(carried, group_dst=move.destination, group=group, tag=tag)
            else:
                if not from_device and part.device.type != "cpu":
                    carried = torch.empty_like(part, device="cpu")
                work = dist.irecv(carried, group_src=move.source, group=group, tag=tag)
            assert work is not None
            under_way.append((work, chunk, part, carried))
        while under_way:
            finish_oldest()
        if embeddings.device.type == "cuda":
            torch.cuda.synchronize(embeddings.device)  # "it has arrived" must be true when it is said
    except RuntimeError as error:
        raise ReshardError(f"a move broke off half-way, so this job ends; resume it. {error}") from error


class _Views:
    """Bytes of the tables that this rank sends or receives, looked up once."""

    def __init__(self, embeddings: ShardedEmbeddings) -> None:
        self._storage = embeddings.storage
        self._of_table: dict[str, dict[str, Tensor]] = {}

    def bytes_of(self, table: str, tensor: str) -> Tensor:
        if table not in self._of_table:
            self._of_table[table] = {
                name: value.detach().reshape(-1).view(torch.uint8)
                for name, value in self._storage.tensors(table).items()
            }
        return self._of_table[table][tensor]


def checksums_of(embeddings: ShardedEmbeddings, moves: Sequence[Move], at: str) -> dict[tuple[str, str], int]:
    """CRC-32 of every tensor of the tables whose move has its `at` (source or destination) here."""
    views = _Views(embeddings)
    return {
        (move.table, tensor): zlib.crc32(views.bytes_of(move.table, tensor).cpu().numpy().data)
        for move in moves
        if getattr(move, at) == embeddings.rank
        for tensor in tensor_bytes(embeddings)[move.table]
    }
