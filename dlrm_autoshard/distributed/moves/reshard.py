"""Moves shards between ranks, and splits and merges them, in mid-training, without changing a bit of the model.

    stats = reshard(embeddings, new_plan, group=runtime.control)         # on every rank, with the same plan

Three steps (agree, transfer, adopt), each on all ranks or on none: nobody ever trains on half-moved tables.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch.distributed as dist

from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.moves.agree import ReshardRefused, agree
from dlrm_autoshard.distributed.moves.transfer import (
    ReshardError,
    checksums_of,
    in_common_order,
    records_of,
    row_sizes,
    transfer,
)
from dlrm_autoshard.distributed.ranks.groups import by_nccl
from dlrm_autoshard.plan import MoveRecord, PlanError, ShardingPlan

__all__ = ["ReshardError", "ReshardRefused", "ReshardStats", "reshard"]

PAGE = 4096


@dataclass(frozen=True)
class ReshardStats:
    """What went from rank to rank, and the seconds that it took (agreement, transfer, adoption)."""

    moves: tuple[MoveRecord, ...]
    seconds: float

    @property
    def bytes(self) -> int:
        """Over all ranks."""
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

    group: gloo, of all ranks. free_bytes: memory this rank may use beyond what it holds, on its device where that is
    not the CPU (default: what the system says). checksums: of every tensor that moves, taken at its source before and
    at its destination after.

    1. *Agree* (agree.py): every rank votes for this very plan and says what memory it needs and has. If one
       lacks it: `ReshardRefused` everywhere, before a byte has moved, and training goes on under the old plan.
    2. *Transfer* (transfer.py): weights and optimizer state as raw bytes, in chunks, straight from where they
       live to where they will.
    3. *Adopt*: once every rank has said that it has all it was sent, the new plan becomes the live one.

    Whatever fails between 1 and 3 raises on every rank that notices, and the job ends: the next one starts from the
    last checkpoint.
    """
    started = time.perf_counter()
    if new_plan.world_size != embeddings.world_size:
        raise PlanError(f"the plan is for {new_plan.world_size} ranks, this job has {embeddings.world_size}.")
    embeddings.check(new_plan)
    new_plan = new_plan.ordered([table.name for table in embeddings.tables])
    changes, storage = embeddings.plan.changes_to(new_plan), embeddings.storage
    moves = tuple(move for move in changes if move.source != move.destination)
    chunk_bytes = max(PAGE, chunk_bytes // PAGE * PAGE)
    by_host = agree(embeddings, new_plan, group, chunk_bytes, free_bytes)

    sums_before = checksums_of(embeddings, moves, at="source") if checksums else {}
    if by_host:
        storage.leave_device({*embeddings.plan.tables_on(embeddings.rank)} - {*new_plan.tables_on(embeddings.rank)})
    (step_group, _), on_gpu = embeddings.groups, embeddings.device.type == "cuda"
    carrier = step_group if by_nccl(step_group) and on_gpu and not by_host else group
    transfer(embeddings, in_common_order(changes, row_sizes(storage, changes), chunk_bytes), carrier)
    sums_after = checksums_of(embeddings, moves, at="destination") if checksums else {}
    _all_have_arrived(sums_before, sums_after, group)

    embeddings.adopt(new_plan)
    _together(group, "adopting the new plan")
    return ReshardStats(records_of(moves, storage), time.perf_counter() - started)


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
