"""First step of a move: every rank votes for the plan and reports the memory it needs and has; all proceed, or none.

    by_host = agree(embeddings, new_plan, group, chunk_bytes, free_bytes)     # ReshardRefused on all ranks, or on none

Nothing has moved yet, so after a refusal training goes on under the old plan.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.moves.transfer import IN_FLIGHT, ReshardError
from dlrm_autoshard.distributed.ranks.free_memory import free_memory
from dlrm_autoshard.errors import UserError, in_words
from dlrm_autoshard.formats.words import gib
from dlrm_autoshard.plan import ShardingPlan


class ReshardRefused(UserError):
    """A rank lacks memory for its new tables. Nothing has moved; the old plan is still live."""


Demand = tuple[str, int, int]
"""(place, bytes needed there beyond those held, bytes free there)."""


@dataclass(frozen=True)
class _Vote:
    """A rank's vote. direct, by_host: its demands if tables go straight to their new place, or through host memory.
    problem: why it cannot move, whatever the memory."""

    rank: int
    plans: tuple[str, str]
    problem: str | None
    direct: tuple[Demand, ...]
    by_host: tuple[Demand, ...] | None


def agree(
    embeddings: ShardedEmbeddings,
    new_plan: ShardingPlan,
    group: dist.ProcessGroup,
    chunk_bytes: int,
    free_bytes: int | None,
) -> bool:
    """Raises the same error on every rank, or on none. Returns True if departing tables must leave the device before
    others arrive, because some device cannot hold both."""
    held, wanted = (set(plan.shards_on(embeddings.rank)) for plan in (embeddings.plan, new_plan))
    plans = (embeddings.plan.fingerprint, new_plan.fingerprint)
    try:
        direct = tuple(_demands(embeddings, new_plan, chunk_bytes, free_bytes, by_host=False))
        by_host = None
        if embeddings.storage.can_leave_device:
            by_host = tuple(_demands(embeddings, new_plan, chunk_bytes, free_bytes, by_host=True))
        vote = _Vote(embeddings.rank, plans, embeddings.storage.claim(wanted - held), direct, by_host)
    except Exception as error:
        vote = _Vote(embeddings.rank, plans, f"rank {embeddings.rank}: {in_words(error)}", (), None)
    try:
        return _counted(embeddings, vote, group)
    except (ReshardRefused, ReshardError):
        embeddings.storage.give_up(wanted - held)
        raise


def _counted(embeddings: ShardedEmbeddings, vote: _Vote, group: dist.ProcessGroup) -> bool:
    """Decides by all ranks' votes, as `agree` describes."""
    votes: list[_Vote | None] = [None] * embeddings.world_size
    try:
        dist.all_gather_object(votes, vote, group=group)
    except RuntimeError as error:
        raise ReshardError(f"a rank was lost before the move: {error}") from error
    voted = [vote for vote in votes if vote is not None]
    if len({vote.plans for vote in voted}) > 1:
        said = ", ".join(f"rank {vote.rank}: {vote.plans[0]} to {vote.plans[1]}" for vote in voted)
        raise ReshardError(f"the ranks were given different moves ({said}). Broadcast one plan to all of them.")
    problem = next((vote.problem for vote in voted if vote.problem), None)
    if problem is not None:
        raise ReshardRefused(problem)
    lacking = _lacking({vote.rank: vote.direct for vote in voted})
    if lacking is None:
        return False
    if all(vote.by_host is not None for vote in voted):
        lacking = _lacking({vote.rank: vote.by_host or () for vote in voted})
    if lacking is not None:
        raise ReshardRefused(lacking)
    return True


def _lacking(demands_of_rank: Mapping[int, Sequence[Demand]]) -> str | None:
    """Returns which rank needs how much more than is free; None if all fits."""
    needs: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, demands in demands_of_rank.items():
        for place, need, free in demands:
            needs[place].append((need, free, rank))
    for place, entries in needs.items():
        total, free = sum(need for need, _, _ in entries), min(free for _, free, _ in entries)
        if total > free:
            neediest = max(entries)
            others = f" (all ranks there: {gib(total)})" if len(entries) > 1 else ""
            return (
                f"rank {neediest[2]} needs {gib(neediest[0])} more for its new tables{others}, "
                f"but {place} has {gib(free)} free"
            )
    return None


def _demands(
    embeddings: ShardedEmbeddings, new_plan: ShardingPlan, chunk_bytes: int, free_bytes: int | None, *, by_host: bool
) -> Iterable[Demand]:
    """Yields the most memory that this rank's part of the move takes at once, by place; nothing if it has no part."""
    rank, storage, on_cpu = embeddings.rank, embeddings.storage, embeddings.device.type == "cpu"
    held, wanted = set(embeddings.plan.shards_on(rank)), set(new_plan.shards_on(rank))
    if held == wanted:
        return
    come, go = storage.bytes_of(wanted - held), storage.bytes_of(held - wanted)
    if by_host:  # departing tables wait in host memory until they are sent; arriving ones take their place
        need = {"device": max(0, come["device"] - go["device"]), "host": go["device"]}
    elif storage.in_pieces:
        need = {"device": 0, "host": max(0, come["host"] - go["host"])}
    else:  # a departing table keeps its memory until it has arrived elsewhere
        need = dict(come)
    need["device"] += max(0, storage.cache_bytes(wanted) - storage.cache_bytes(held))
    if free_bytes is None:
        need["host"] += min(IN_FLIGHT * chunk_bytes, sum(come.values()) + sum(go.values()))
    host = socket.gethostname()
    memory = f"rank {rank}" if free_bytes is not None else f"the memory of {host}"
    yield memory, need["host"], free_memory() if free_bytes is None or not storage.in_pieces else free_bytes
    if on_cpu and not storage.in_pieces:
        yield f"the device of rank {rank}", need["device"], free_memory() if free_bytes is None else free_bytes
    elif not on_cpu:
        free = free_memory(embeddings.device)
        place = torch.cuda.get_device_properties(embeddings.device).uuid
        yield f"GPU {place} of {host}", need["device"], free if free_bytes is None else free_bytes
