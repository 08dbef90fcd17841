"""Second step of a move: weights and optimizer state travel as raw bytes, in chunks, straight to their new place.

transfer(embeddings, in_common_order(moves, row_sizes(embeddings.storage, moves), chunk_bytes), group)
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.distributed.ranks.groups import by_nccl
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import Move, MoveRecord
from dlrm_autoshard.tables import Shard, TableConfig

PAGE = 4096
IN_FLIGHT = 4
"""Chunks that a rank sends or receives at once."""

RowSizes = Mapping[str, Mapping[str, tuple[int, int]]]
"""(rows, bytes per row) of each tensor of each moving shard."""


class Storage(Protocol):
    """Memory of departing and arriving shards, by name."""

    def table(self, name: Shard) -> TableConfig: ...
    def shape(self, name: Shard, tensor: str) -> tuple[int, ...]: ...
    def row_bytes(self, name: Shard) -> Mapping[str, tuple[int, int]]: ...
    def tensors(self, name: Shard) -> Mapping[str, Tensor]: ...
    def release_part(self, name: Shard, tensor: str, start: int, stop: int) -> None: ...


class Embeddings(Protocol):
    """Tables whose shards move."""

    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def storage(self) -> Storage: ...


class ReshardError(UserError):
    """A move failed half-way: this process must end, and the job starts again from its last checkpoint."""


@dataclass(frozen=True)
class Chunk:
    """Rows [start, stop) of one tensor of a move, counted from the move's first row."""

    move: Move
    tensor: str
    start: int
    stop: int


def row_sizes(storage: Storage, moves: Sequence[Move]) -> RowSizes:
    """Returns bytes per row of each moving shard's tensors."""
    return {move.shard: storage.row_bytes(move.shard) for move in moves}


def records_of(moves: Sequence[Move], storage: Storage) -> tuple[MoveRecord, ...]:
    """Returns the moves with the bytes that each carries."""
    sizes = row_sizes(storage, moves)
    return tuple(move.record(sum(rows * row for rows, row in sizes[move.shard].values())) for move in moves)


def in_common_order(moves: Sequence[Move], sizes: RowSizes, chunk_bytes: int) -> list[Chunk]:
    """Returns all chunks of all moves in an order that is equal on every rank: routes (sending ranks, receiving ranks)
    advance at the same relative pace.

    A re-split table travels row by row with all columns, so that the old shards' memory is freed as the new ones'
    fills; row ranges travel side by side."""
    together: dict[Move | str, list[Move]] = defaultdict(list)
    for move in moves:
        whole = move.leaves is None and move.arrives is None
        together[move if whole else move.shard.table].append(move)
    chunks_of_route: dict[tuple[tuple[int, ...], ...], list[tuple[int, list[Chunk]]]] = defaultdict(list)
    for group, span in itertools.chain.from_iterable(map(_by_rows, together.values())):
        route = tuple(tuple(sorted({getattr(move, end) for move in group})) for end in ("source", "destination"))
        for tensor in sizes[group[0].shard]:
            row = sum(sizes[move.shard][tensor][1] for move in group)
            first, last = span or (0, sizes[group[0].shard][tensor][0])
            for start in range(first, last, max(1, chunk_bytes // row)):
                stop = min(last, start + max(1, chunk_bytes // row))
                firsts = [0 if move.shard.rows is None else move.shard.rows[0] for move in group]
                chunks = [Chunk(m, tensor, start - at, stop - at) for m, at in zip(group, firsts, strict=True)]
                chunks_of_route[route].append(((stop - start) * row, chunks))
    keyed = []
    for route, sized in chunks_of_route.items():
        ends = list(itertools.accumulate(size for size, _ in sized))
        keyed += [((end / ends[-1], route), chunks) for end, (_, chunks) in zip(ends, sized, strict=True)]
    return [chunk for _, chunks in sorted(keyed, key=lambda item: item[0]) for chunk in chunks]


def _by_rows(moves: Sequence[Move]) -> list[tuple[list[Move], tuple[int, int] | None]]:
    """Groups moves by the row ranges that they carry; None: all rows."""
    if all(move.shard.rows is None for move in moves):
        return [(list(moves), None)]
    ends = sorted({end for move in moves for end in move.shard.rows or ()})
    found: list[tuple[list[Move], tuple[int, int] | None]] = []
    for start, stop in itertools.pairwise(ends):
        within = Shard.of(moves[0].shard.table, rows=(start, stop))
        carried = [move for move in moves if move.shard & within is not None]
        found += [(carried, (start, stop))] if carried else []
    return found


def transfer(embeddings: Embeddings, chunks: Sequence[Chunk], group: dist.ProcessGroup) -> None:
    """Sends and receives this rank's chunks. group: nccl, between device memories, or gloo, between host memories.

    It cannot deadlock: chunks are in one order on every rank, and each rank works through its own a few at a time, so
    the first unfinished chunk is always under way at both ends.

    If something fails on a rank (such as memory), it goes on sending and receiving arbitrary bytes, so that none waits
    in vain, and raises at the end. If the exchange itself fails, ReshardError is raised at once.

    It needs little memory on CPU: all routes progress at the same rate, and a sender frees a chunk's pages once sent. A
    rank holds at most the larger of its two layouts and a few chunks.
    """
    rank = embeddings.rank
    views, sent = _Views(embeddings.storage), Sent(embeddings.storage, chunks)
    carrier = embeddings.device if by_nccl(group) else torch.device("cpu")
    under_way: deque[tuple[dist.Work, Chunk, Tensor]] = deque()
    size_of = {id(chunk): _size(embeddings.storage, chunk) for chunk in chunks}
    spare = torch.empty(max(size_of.values(), default=0), dtype=torch.uint8, device=carrier)
    failures: list[Exception] = []

    def tried(step: Callable[[], Tensor | None]) -> Tensor | None:
        """Runs a step; returns None once anything has failed."""
        try:
            return None if failures else step()
        except Exception as error:
            failures.append(error)
            return None

    def left(chunk: Chunk) -> Tensor:
        return views.leaving(chunk).contiguous().to(carrier)  # copies only if needed

    def finish_oldest() -> None:
        work, chunk, carried = under_way.popleft()
        work.wait()
        tried(lambda: sent.mark(chunk) if chunk.move.source == rank else views.put(chunk, carried))

    try:
        # The tag is the chunk's index in the common order, which is equal at both ends.
        for tag, chunk in enumerate(chunks):
            move = chunk.move
            if rank not in (move.source, move.destination):
                continue
            if move.source == move.destination:
                tried(lambda chunk=chunk: views.put(chunk, views.leaving(chunk)))  # type: ignore[misc]
                tried(lambda chunk=chunk: sent.mark(chunk))  # type: ignore[misc]
                continue
            if len(under_way) == IN_FLIGHT:
                finish_oldest()
            place = left if move.source == rank else partial(views.place_for, carrier=carrier)
            carried = tried(partial(place, chunk))
            carried = spare[: size_of[id(chunk)]] if carried is None else carried
            if move.source == rank:
                work = dist.isend(_bytes_of(carried), group_dst=move.destination, group=group, tag=tag)
            else:
                work = dist.irecv(_bytes_of(carried), group_src=move.source, group=group, tag=tag)
            assert work is not None
            under_way.append((work, chunk, carried))
        while under_way:
            finish_oldest()
        if embeddings.device.type == "cuda":
            torch.cuda.synchronize(embeddings.device)  # nothing has arrived before this
    except RuntimeError as error:
        raise ReshardError(f"a move broke off half-way, so this job ends; resume it. {error}") from error
    if failures:
        raise failures[0]


def _size(storage: Storage, chunk: Chunk) -> int:
    """Returns the chunk's bytes."""
    _, row = storage.row_bytes(chunk.move.shard)[chunk.tensor]
    return (chunk.stop - chunk.start) * row


class _Views:
    """Views of the rows and columns that this rank sends or receives; finds each shard's tensors once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._of_shard: dict[Shard, dict[str, Tensor]] = {}

    def leaving(self, chunk: Chunk) -> Tensor:
        return self._part(chunk.move.leaves or chunk.move.shard, chunk)

    def arriving(self, chunk: Chunk) -> Tensor:
        return self._part(chunk.move.arrives or chunk.move.shard, chunk)

    def place_for(self, chunk: Chunk, carrier: torch.device) -> Tensor:
        """Returns memory to receive the chunk: its own place if contiguous there, else a buffer."""
        part = self.arriving(chunk)
        if self.travels_unchanged(chunk) and part.is_contiguous() and part.device == carrier:
            return part
        return torch.empty(part.shape, dtype=part.dtype, device=carrier)

    def put(self, chunk: Chunk, arrived: Tensor) -> None:
        part, share = self.arriving(chunk), self._share(chunk)
        if share != 1.0:
            part.add_(arrived.to(part.device), alpha=share)
        elif part.data_ptr() != arrived.data_ptr():
            part.copy_(arrived)

    def travels_unchanged(self, chunk: Chunk) -> bool:
        return self._share(chunk) == 1.0

    def _share(self, chunk: Chunk) -> float:
        """Returns the weight of an arriving part in row-wise state, which is the mean of the merged shards' by columns,
        as one sum over the whole row would be; 1 for elementwise state."""
        if len(self._storage.shape(chunk.move.shard, chunk.tensor)) > 1:
            return 1.0
        moved, whole = (
            self._storage.table(name) for name in (chunk.move.shard, chunk.move.arrives or chunk.move.shard)
        )
        return moved.embedding_dim / whole.embedding_dim

    def _part(self, shard: Shard, chunk: Chunk) -> Tensor:
        if shard not in self._of_shard:
            self._of_shard[shard] = {n: value.detach() for n, value in self._storage.tensors(shard).items()}
        tensor = self._of_shard[shard][chunk.tensor]
        rows, columns = chunk.move.shard.within(shard)
        part = tensor[rows] if tensor.dim() == 1 else tensor[rows, columns]
        return part[chunk.start : chunk.stop]


class Sent:
    """Frees departing shards' memory: a range of rows once all of its columns have been sent."""

    def __init__(self, storage: Storage, chunks: Sequence[Chunk]) -> None:
        self._storage = storage
        self._open = Counter(map(self._rows, chunks))
        self._gone: dict[tuple[Shard, str], int] = defaultdict(int)  # all rows before this one are sent
        self._further: dict[tuple[Shard, str], dict[int, int]] = defaultdict(
            dict
        )  # later rows that are sent: start -> stop

    def mark(self, chunk: Chunk) -> None:
        rows = self._rows(chunk)
        self._open[rows] -= 1
        if self._open[rows] == 0:
            shard, tensor, start, stop = rows
            _, row = self._storage.row_bytes(shard)[tensor]
            key, further = (shard, tensor), self._further[shard, tensor]
            # A page shared with earlier rows is freed only once all of those are sent.
            first = start * row if start == self._gone[key] else -(-start * row // PAGE) * PAGE
            further[start] = stop
            while self._gone[key] in further:
                self._gone[key] = further.pop(self._gone[key])
            self._storage.release_part(shard, tensor, first, stop * row)

    @staticmethod
    def _rows(chunk: Chunk) -> tuple[Shard, str, int, int]:
        """Returns the shard that the rows leave, the tensor, and its rows [start, stop)."""
        leaves = chunk.move.leaves or chunk.move.shard
        first = chunk.move.shard.within(leaves)[0].start or 0
        return leaves, chunk.tensor, first + chunk.start, first + chunk.stop


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def checksums_of(embeddings: Embeddings, moves: Sequence[Move], at: str) -> dict[tuple[Shard, str], int]:
    """Returns the CRC-32 of every moving tensor whose `at` (source or destination) is this rank."""
    views, sums = _Views(embeddings.storage), {}
    for move in moves:
        for tensor, (rows, _) in embeddings.storage.row_bytes(move.shard).items():
            chunk = Chunk(move, tensor, 0, rows)
            if getattr(move, at) == embeddings.rank and views.travels_unchanged(chunk):
                part = views.leaving(chunk) if at == "source" else views.arriving(chunk)
                sums[move.shard, tensor] = zlib.crc32(_bytes_of(part.cpu().contiguous()).numpy().data)
    return sums
