"""A move's first step: every rank votes for this very plan and says what memory it needs and has. All go on, or none.

    agree(embeddings, new_plan, group, chunk_bytes, free_bytes)        # ReshardRefused on every rank, or on none

Nothing has moved yet, so a refusal costs nothing: training goes on under the old plan.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from dlrm_autoshard.distributed.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.reshard_transfer import IN_FLIGHT, ReshardError, tensor_bytes
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan, gib


class ReshardRefused(UserError):
    """Some rank has no memory for its new tables. Nothing has moved; the old plan is as live as before."""


@dataclass(frozen=True)
class _Vote:
    """rank's readiness. demands: (place, bytes needed beyond what is held, bytes free there)."""

    rank: int
    plans: tuple[str, str]
    demands: tuple[tuple[str, int, int], ...]


def agree(
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
