"""Moves, splits and merges shards during training, without changing a bit of the model.

    stats = reshard(embeddings, new_plan, group=runtime.control)         # on every rank, with the same plan

Three steps (agree, transfer, adopt), each on all ranks or on none: no rank ever trains on half-moved tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.moves.agree import ReshardRefused, agree
from dlrm_autoshard.distributed.moves.transfer import (
    PAGE,
    ReshardError,
    checksums_of,
    in_common_order,
    records_of,
    row_sizes,
    transfer,
)
from dlrm_autoshard.distributed.ranks.groups import by_nccl
from dlrm_autoshard.distributed.ranks.runtime import on_all
from dlrm_autoshard.distributed.tables.storage import Lost
from dlrm_autoshard.errors import in_words
from dlrm_autoshard.plan import MoveRecord, PlanError, ShardingPlan
from dlrm_autoshard.tables import Shard

__all__ = ["ReshardError", "ReshardRefused", "ReshardStats", "reshard"]

T = TypeVar("T")
Sums = dict[tuple[Shard, str], int]


@dataclass(frozen=True)
class ReshardStats:
    """Shards that moved between ranks, and seconds for agreement, transfer and adoption."""

    moves: tuple[MoveRecord, ...]
    seconds: float

    @property
    def bytes(self) -> int:
        """Bytes moved over all ranks."""
        return sum(move["bytes"] for move in self.moves)


def reshard(
    embeddings: ShardedEmbeddings,
    new_plan: ShardingPlan,
    *,
    group: dist.ProcessGroup,
    chunk_bytes: int = 16 << 20,
    free_bytes: int | None = None,
    checksums: bool = False,
) -> ReshardStats:
    """Moves the shards on which `new_plan` differs and makes it the live plan. Call it between steps, on every rank.

    group: gloo, all ranks. free_bytes: memory that this rank may use beyond what it holds, on its device if that is not
    the CPU (default: what the system reports). checksums: compare every moved tensor at its source and its destination.

    1. *Agree* (agree.py): every rank votes for the plan and reports the memory it needs and has. If any lacks memory,
       `ReshardRefused` is raised everywhere before anything moves, and training goes on under the old plan.
    2. *Transfer* (transfer.py): weights and optimizer state travel as raw bytes, in chunks, straight to their new
    place. 3. *Adopt*: once every rank has everything it was sent, the new plan becomes the live one.

    A failure after 1 on any rank raises ReshardError on every rank. Rows may be lost, so these embeddings refuse
    further use: the next job starts from the last checkpoint.
    """
    started, rank = time.perf_counter(), embeddings.rank
    new_plan = on_all(group, lambda: _checked(embeddings, new_plan))
    changes, storage = embeddings.plan.changes_to(new_plan), embeddings.storage
    moves = tuple(move for move in changes if move.source != move.destination)
    chunk_bytes = max(PAGE, chunk_bytes // PAGE * PAGE)
    by_host = agree(embeddings, new_plan, group, chunk_bytes, free_bytes)
    (step_group, _), on_gpu = embeddings.groups, embeddings.device.type == "cuda"
    carrier = step_group if by_nccl(step_group) and on_gpu and not by_host else group

    def travel() -> tuple[Sums, Sums]:
        before = checksums_of(embeddings, moves, at="source") if checksums else {}
        if by_host:
            storage.leave_device({*embeddings.plan.shards_on(rank)} - {*new_plan.shards_on(rank)})
        transfer(embeddings, in_common_order(changes, row_sizes(storage, changes), chunk_bytes), carrier)
        return before, checksums_of(embeddings, moves, at="destination") if checksums else {}

    try:
        _check_sums(_together(group, "tables travelled", travel))
        _together(group, "the new plan was adopted", lambda: embeddings.adopt(new_plan))
    except BaseException as error:
        why = f"tables were lost when a move broke off: start again from the last checkpoint. {error}"
        embeddings.storage = Lost(why)  # type: ignore[assignment]
        raise
    return ReshardStats(records_of(moves, storage), time.perf_counter() - started)


def _checked(embeddings: ShardedEmbeddings, plan: ShardingPlan) -> ShardingPlan:
    """Returns the plan in the tables' order; PlanError if these tables cannot move to it."""
    if plan.world_size != embeddings.world_size:
        raise PlanError(f"the plan is for {plan.world_size} ranks, this job has {embeddings.world_size}.")
    embeddings.check(plan)
    return plan.ordered([table.name for table in embeddings.tables])


def _check_sums(said: Sequence[tuple[Sums, Sums]]) -> None:
    """Raises ReshardError if a tensor's checksum changed on its way."""
    sent = {key: value for before, _ in said for key, value in before.items()}
    arrived = {key: value for _, after in said for key, value in after.items()}
    damaged = sorted(f"'{table}' ({tensor})" for table, tensor in sent if sent[table, tensor] != arrived[table, tensor])
    if damaged:
        raise ReshardError(f"tables changed on their way: {', '.join(damaged)}. This job ends; resume it.")


def _together(group: dist.ProcessGroup, doing: str, attempt: Callable[[], T]) -> list[T]:
    """Returns each rank's result of `attempt`. ReshardError on every rank if it fails on any."""
    value: T | None = None
    failure: Exception | None = None
    try:
        value = attempt()
    except ReshardError:
        raise  # an exchange failed: the others have noticed, and messages no longer get through
    except Exception as error:
        failure = error
    everyone: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(everyone, (value, None if failure is None else in_words(failure)), group=group)
    except RuntimeError as error:
        raise ReshardError(f"a rank was lost while {doing}, so this job ends; resume it. {error}") from error
    for rank, (_, problem) in enumerate(everyone):
        if problem is not None:
            raise ReshardError(f"rank {rank} failed while {doing}, so this job ends; resume it. {problem}") from failure
    return [value for value, _ in everyone]
