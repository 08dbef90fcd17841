"""Moves tables between ranks in the middle of training, from any plan to any plan, without changing a bit of the model.

    stats = reshard(embeddings, new_plan, group=runtime.control)         # on every rank, with the same plan
    stats.bytes, stats.seconds                                           # 412 MiB in 0.31 s

In three steps, each on all ranks or on none:
1. *Agree*: every rank votes for this very plan and says what memory it needs and has. If one lacks it:
   `ReshardRefused` everywhere, before a byte has moved, and training goes on under the old plan.
2. *Transfer*: weights and optimizer state as raw bytes, in chunks, straight from where they live to where they will.
3. *Adopt*: once every rank has said that it has all it was sent, the new plan becomes the live one.

Whatever fails between 1 and 3 raises on every rank that notices, and the job ends: the next one starts from the last
checkpoint. Nobody ever trains on half-moved tables.

Why it can't deadlock: all chunks stand in one order, the same on every rank. A rank works through those that concern
it, a few at a time, so the first unfinished chunk is always under way at both of its ends.
Why it needs little memory: that order lets every pair of ranks progress at the same rate, and a sender gives back the
pages of a chunk as soon as it is sent. A rank never holds more than the larger of its two layouts and a few chunks.
"""

from __future__ import annotations

import itertools
import socket
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.distributed.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.storage import state_shapes
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import Move, PlanError, ShardingPlan, gib

IN_FLIGHT = 4
"""Chunks that a rank sends or receives at a time."""
PAGE = 4096


class ReshardRefused(UserError):
    """Some rank has no memory for its new tables. Nothing has moved; the old plan is as live as before."""


class ReshardError(UserError):
    """A move that failed half-way: this process must end, and the job starts again from its last checkpoint."""


@dataclass(frozen=True)
class ReshardStats:
    """What a move took: bytes over all ranks, and seconds of it all (agreement, transfer, adoption)."""

    moves: tuple[Move, ...]
    bytes: int
    seconds: float
    transfer_seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second while tables travelled; 0 where none did."""
        return self.bytes / self.transfer_seconds if self.transfer_seconds > 0 else 0.0


@dataclass(frozen=True)
class Chunk:
    """Bytes [start, stop) of one tensor of a table that moves."""

    move: Move
    tensor: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Vote:
    """rank's readiness. demands: (place, bytes needed beyond what is held, bytes free there)."""

    rank: int
    plans: tuple[str, str]
    demands: tuple[tuple[str, int, int], ...]


def reshard(
    embeddings: ShardedEmbeddings,
    new_plan: ShardingPlan,
    *,
    group: dist.ProcessGroup,
    chunk_bytes: int = 16 << 20,
    free_bytes: int | None = None,
    checksums: bool = False,
) -> ReshardStats:
    """Moves the tables on which `new_plan` differs and makes it the live plan. Call it between steps, on every rank.

    group: gloo, of all ranks. free_bytes: memory this rank may use beyond what it holds (default: what the system
    says). checksums: of every tensor that moves, taken at its source before and at its destination after.
    """
    started = time.perf_counter()
    if new_plan.world_size != embeddings.world_size:
        raise PlanError(f"the plan is for {new_plan.world_size} ranks, this job has {embeddings.world_size}.")
    new_plan = new_plan.ordered([table.name for table in embeddings.tables])
    moves = embeddings.plan.moves_to(new_plan)
    chunk_bytes = max(PAGE, chunk_bytes // PAGE * PAGE)
    _agree(embeddings, new_plan, group, chunk_bytes, free_bytes)

    sums_before = _checksums(embeddings, moves, at="source") if checksums else {}
    transfer_started = time.perf_counter()
    _transfer(embeddings, in_common_order(moves, tensor_bytes(embeddings), chunk_bytes), group)
    transfer_seconds = time.perf_counter() - transfer_started
    sums_after = _checksums(embeddings, moves, at="destination") if checksums else {}
    _all_have_arrived(sums_before, sums_after, group)

    embeddings.adopt(new_plan)
    _together(group, "adopting the new plan")
    moved = sum(sum(tensor_bytes(embeddings)[move.table].values()) for move in moves)
    return ReshardStats(moves, moved, time.perf_counter() - started, transfer_seconds if moves else 0.0)


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


# 1. Agree ------------------------------------------------------------------------------------------------------------


def _agree(
    embeddings: ShardedEmbeddings,
    new_plan: ShardingPlan,
    group: dist.ProcessGroup,
    chunk_bytes: int,
    free_bytes: int | None,
) -> None:
    """Raises the same error on every rank, or on none."""
    plans = (embeddings.plan.fingerprint, new_plan.fingerprint)
    vote = _Vote(embeddings.rank, plans, tuple(_demands(embeddings, new_plan, chunk_bytes, free_bytes)))
    votes: list[_Vote | None] = [None] * embeddings.world_size
    try:
        dist.all_gather_object(votes, vote, group=group)
    except RuntimeError as error:
        raise ReshardError(f"a rank went away before the move: {error}") from error
    voted = [vote for vote in votes if vote is not None]
    if len({vote.plans for vote in voted}) > 1:
        said = ", ".join(f"rank {vote.rank}: {vote.plans[0]} to {vote.plans[1]}" for vote in voted)
        raise ReshardError(f"the ranks were told to make different moves ({said}). Broadcast one plan to all of them.")
    needs: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for vote in voted:
        for place, need, free in vote.demands:
            needs[place].append((need, free, vote.rank))
    for place, entries in needs.items():
        total, free = sum(need for need, _, _ in entries), min(free for _, free, _ in entries)
        if total > free:
            neediest = max(entries)
            others = f" (all ranks there: {gib(total)})" if len(entries) > 1 else ""
            raise ReshardRefused(
                f"rank {neediest[2]} needs {gib(neediest[0])} more for its new tables{others}, "
                f"but {place} has {gib(free)} free"
            )


def _demands(
    embeddings: ShardedEmbeddings, new_plan: ShardingPlan, chunk_bytes: int, free_bytes: int | None
) -> Iterable[tuple[str, int, int]]:
    """Memory that this rank's part of the move takes, place by place; nothing where it has no part."""
    rank, host = embeddings.rank, socket.gethostname()
    sizes = {table: sum(tensors.values()) for table, tensors in tensor_bytes(embeddings).items()}
    held, wanted = set(embeddings.plan.tables_on(rank)), set(new_plan.tables_on(rank))
    if held == wanted:
        return
    growth = max(0, sum(sizes[table] for table in wanted) - sum(sizes[table] for table in held))
    memory = f"rank {rank}" if free_bytes is not None else f"the memory of {host}"
    free = free_memory() if free_bytes is None else free_bytes
    in_flight = min(IN_FLIGHT * chunk_bytes, sum(sizes[table] for table in held ^ wanted))
    if embeddings.device.type == "cpu":
        yield memory, growth + (in_flight if free_bytes is None else 0), free
    else:
        yield memory, sum(sizes[table] for table in wanted) + in_flight, free  # the new layout is staged in host memory
        on_device, _ = torch.cuda.mem_get_info(embeddings.device)
        cached = torch.cuda.memory_reserved(embeddings.device) - torch.cuda.memory_allocated(embeddings.device)
        yield f"GPU {embeddings.device.index} of {host}", growth, on_device + cached


def free_memory() -> int:
    """Bytes that this process could still take: of the machine, or of its control group where that is tighter."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free  # no such group, or one of the first version, whose limit the kernel doesn't tell us here
    if limit == "max":
        return free
    return min(free, int(limit) - used + int(stat.get("inactive_file", 0)))


# 2. Transfer ---------------------------------------------------------------------------------------------------------


def _transfer(embeddings: ShardedEmbeddings, chunks: Sequence[Chunk], group: dist.ProcessGroup) -> None:
    rank = embeddings.rank
    views = _Views(embeddings)
    under_way: deque[tuple[dist.Work, Chunk, Tensor]] = deque()

    def finish_oldest() -> None:
        work, chunk, _kept_alive = under_way.popleft()
        work.wait()
        if chunk.move.source == rank:
            embeddings.storage.release_part(chunk.move.table, chunk.tensor, chunk.start, chunk.stop)

    try:
        # The tag is the chunk's number in the common order: equal at both ends by construction.
        for tag, chunk in enumerate(chunks):
            move = chunk.move
            if rank not in (move.source, move.destination):
                continue
            if len(under_way) == IN_FLIGHT:
                finish_oldest()
            part = views.bytes_of(move.table, chunk.tensor)[chunk.start : chunk.stop]
            if move.source == rank:
                part = part.cpu()  # no copy where it is in host memory already
                work = dist.isend(part, group_dst=move.destination, group=group, tag=tag)
            else:
                work = dist.irecv(part, group_src=move.source, group=group, tag=tag)
            assert work is not None
            under_way.append((work, chunk, part))
        while under_way:
            finish_oldest()
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


def _checksums(embeddings: ShardedEmbeddings, moves: Sequence[Move], at: str) -> dict[tuple[str, str], int]:
    """CRC-32 of every tensor of the tables whose move has its `at` (source or destination) here."""
    views = _Views(embeddings)
    return {
        (move.table, tensor): zlib.crc32(views.bytes_of(move.table, tensor).cpu().numpy().data)
        for move in moves
        if getattr(move, at) == embeddings.rank
        for tensor in tensor_bytes(embeddings)[move.table]
    }


# 3. Adopt ------------------------------------------------------------------------------------------------------------


def _all_have_arrived(
    before: dict[tuple[str, str], int], after: dict[tuple[str, str], int], group: dist.ProcessGroup
) -> None:
    """Waits for every rank's word that it has received all; compares checksums where there are any."""
    sums = _together(group, "waiting for the others to receive their tables", (before, after))
    sent = {key: value for rank_before, _ in sums for key, value in rank_before.items()}
    arrived = {key: value for _, rank_after in sums for key, value in rank_after.items()}
    damaged = sorted(f"'{table}' ({tensor})" for table, tensor in sent if sent[table, tensor] != arrived[table, tensor])
    if damaged:
        raise ReshardError(f"tables arrived other than they left: {', '.join(damaged)}. This job ends; resume it.")


def _together(group: dist.ProcessGroup, doing: str, said: object = None) -> list[tuple[dict, dict]]:  # type: ignore[type-arg]
    everyone: list[object] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everyone, said, group=group)
    except RuntimeError as error:
        raise ReshardError(f"a rank went away while {doing}, so this job ends; resume it. {error}") from error
    return everyone  # type: ignore[return-value]
