"""Moves a TorchRec model's tables: rebuilds modules beside the live ones, fills, compares, and only then keeps them.

stats = move(sharded_model, plan)               # on every rank, between steps, with the same plan

TorchRec's own `reshard` is not used: its tags differ between processes without a common hash seed, so it hangs on gloo,
and after some moves features silently reach other tables.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlrm_autoshard.distributed.moves.reshard import PAGE, ReshardError, ReshardRefused, ReshardStats
from dlrm_autoshard.distributed.moves.transfer import checksums_of, in_common_order, records_of, row_sizes, transfer
from dlrm_autoshard.distributed.ranks.free_memory import free_memory
from dlrm_autoshard.distributed.ranks.groups import by_nccl
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.words import gib
from dlrm_autoshard.plan import Move, ShardingPlan
from dlrm_autoshard.tables import Shard as ShardName
from dlrm_autoshard.tables import TableConfig
from dlrm_autoshard.torchrec.model import ShardedModel
from dlrm_autoshard.torchrec.optimizers import follow, why_not_to_follow
from dlrm_autoshard.torchrec.plan_format import to_sharding_plan
from dlrm_autoshard.torchrec.rebuild import put_in_place, rebuilt, table_parameters
from dlrm_autoshard.torchrec.sharding import plan_record, shapes_of
from dlrm_autoshard.torchrec.shards import Settings, Shard, digest, local_shards, restore_settings, why_not
from dlrm_autoshard.torchrec.tables import configs_of, table_key

CHUNK_BYTES = 4096 * PAGE


@dataclass(frozen=True)
class _Facts:
    """Facts about a shard that all ranks need from its owner before it moves. formats: (bytes per element, number of
    dimensions) of each tensor."""

    formats: Mapping[str, tuple[int, int]]
    settings: Settings


def move(sharded: ShardedModel, plan: ShardingPlan) -> ReshardStats:
    """Makes `plan` the live one without changing a bit of weights, optimizer state, learning rates or counters.

    Rebuilds only modules with moves. Keeps the live ones until the new ones are verified: moved rows by checksums,
    other rows directly, and the last batch's pooled vectors must be equal.

    ReshardRefused, on every rank: the old plan is still live (no memory, an optimizer that cannot follow, or a failed
    verification). Failures between ranks raise ReshardError, and the job ends.
    """
    started, runtime = time.perf_counter(), sharded.runtime
    plan = plan.ordered([table.name for table in sharded.tables])
    changes = sharded.plan.changes_to(plan)
    moves = tuple(change for change in changes if change.source != change.destination)
    if len(set(runtime.all_gather(plan.fingerprint))) > 1:
        raise ReshardRefused("the ranks were given different plans; broadcast one plan to all of them")
    if not changes:
        return ReshardStats((), time.perf_counter() - started)
    changed = _modules_of(sharded, changes)
    old = _shards(sharded, changed)
    facts = _agree(sharded, changed, old, plan)
    sharded.check_splits(plan)
    pooled = _pooled(sharded, changed)
    _restore(sharded, changed, facts)  # that lookup counted as an iteration
    record = plan_record(plan, shapes_of(sharded.collections), sharded.device.type, runtime.local_ranks)
    sharding = to_sharding_plan(record).plan
    fresh, failure = _try(lambda: {path: rebuilt(module, sharding[path]) for path, module in changed.items()})
    if fresh is not None:
        said = [why_not(module, fresh[path], _settings(sharded, path, facts)) for path, module in changed.items()]
        failure = next((ReshardRefused(reason) for reason in said if reason), None)
    _all_well(sharded, "rebuild its modules", failure)

    new = _shards(sharded, fresh)
    between = _Between(sharded, old, new, facts)
    carrier = runtime.group if by_nccl(runtime.group) and sharded.device.type == "cuda" else runtime.control

    def travel() -> dict[tuple[ShardName, str], int]:
        sums = checksums_of(between, changes, at="source")
        transfer(between, in_common_order(changes, row_sizes(between, changes), CHUNK_BYTES), carrier)
        for name in old.keys() & new.keys():
            for tensor, value in new[name].tensors.items():
                value.copy_(old[name].tensors[tensor])
        return sums

    sums_before, failure = _try(travel)
    if isinstance(failure, ReshardError):  # of an exchange: the others have noticed, and messages no longer get through
        raise failure
    _all_well(sharded, "move its tables", failure)

    old_parameters = {path: table_parameters(module) for path, module in changed.items()}
    undo = [put_in_place(module, fresh[path]) for path, module in changed.items()]
    _restore(sharded, changed, facts)
    sums_after = checksums_of(between, changes, at="destination")
    reason, failure = _try(lambda: _what_differs(sharded, changed, old, pooled))
    _restore(sharded, changed, facts)  # the comparison's lookup counted as an iteration
    reason = reason or (None if failure is None else str(failure))
    wrong = _wrong(runtime.all_gather((sums_before, sums_after, reason)))
    if wrong is not None:
        for back in undo:
            back()
        _restore(sharded, changed, facts)
        raise ReshardRefused(f"the move was undone: {wrong}")
    for path, module in changed.items():
        follow(sharded.optimizer, old_parameters[path], table_parameters(module))
        sharded.model.plan.plan[path] = module.module_sharding_plan
    sharded.plan = plan
    return ReshardStats(records_of(moves, between), time.perf_counter() - started)


class _Between:
    """Where `transfer` reads and writes: leaving rows from the old modules, arriving rows into the new ones."""

    def __init__(
        self,
        sharded: ShardedModel,
        old: Mapping[ShardName, Shard],
        new: Mapping[ShardName, Shard],
        facts: Mapping[ShardName, _Facts],
    ) -> None:
        self.rank, self.device, self.storage = sharded.runtime.rank, sharded.device, self
        self._shards = {**new, **old}
        self._tables = {table.name: table for table in sharded.model_tables}
        self._formats = {shard.table: facts[shard].formats for shard in sharded.plan.shards if shard in facts}

    def table(self, name: ShardName) -> TableConfig:
        """Returns a shard as a table of its own."""
        return self._tables[name.table].holding(name)

    def shape(self, name: ShardName, tensor: str) -> tuple[int, ...]:
        table = self.table(name)
        _, dimensions = self._formats[name.table][tensor]
        return (table.num_embeddings, table.embedding_dim)[:dimensions]

    def row_bytes(self, name: ShardName) -> dict[str, tuple[int, int]]:
        sizes = {}
        for tensor, (item, _) in self._formats[name.table].items():
            rows, *columns = self.shape(name, tensor)
            sizes[tensor] = rows, item * math.prod(columns)
        return sizes

    def tensors(self, name: ShardName) -> Mapping[str, Tensor]:
        return self._shards[name].tensors

    def release_part(self, name: ShardName, tensor: str, start: int, stop: int) -> None:
        """Does nothing: old rows are kept until the move is verified."""


def _modules_of(sharded: ShardedModel, changes: Sequence[Move]) -> dict[str, Any]:
    moving = {change.shard.table for change in changes}
    return {
        path: module
        for path, module in sharded.collections.items()
        if any(table_key(path, config.name, sharded.collections) in moving for config in configs_of(module))
    }


def _shards(sharded: ShardedModel, modules: Mapping[str, Any]) -> dict[ShardName, Shard]:
    return {
        ShardName(table_key(path, name, sharded.collections)): shard
        for path, module in modules.items()
        for name, shard in local_shards(module).items()
    }


def _agree(
    sharded: ShardedModel, changed: Mapping[str, Any], old: Mapping[ShardName, Shard], plan: ShardingPlan
) -> dict[ShardName, _Facts]:
    """Shares facts about shards between all ranks; ReshardRefused on all if any rank cannot move."""
    runtime = sharded.runtime
    mine = {name: _Facts(shard.formats, shard.settings) for name, shard in old.items()}
    place = (platform.node(), free_memory(sharded.device))
    why = why_not_to_follow(sharded.optimizer, [table_parameters(module) for module in changed.values()])
    said = runtime.all_gather((mine, place, why))
    facts = {name: fact for own, _, _ in said for name, fact in own.items()}
    reasons = [reason for _, _, reason in said if reason]
    tables = {table.name: table for table in sharded.model_tables}
    moving = {name.table for name in facts}
    needed: dict[str, int] = {}
    for rank, (_, (host, free), _) in enumerate(said):
        where = host if sharded.device.type == "cpu" else f"the GPU of rank {rank}"
        shards = [shard for shard in plan.shards_on(rank) if shard.table in moving]
        parts = [tables[shard.table].holding(shard) for shard in shards]
        needed[where] = needed.get(where, 0) + sum(
            part.weight_bytes + part.optimizer_bytes(sharded.config.optimizer.name) for part in parts
        )
        if needed[where] > free:
            reasons.append(
                f"rebuilt modules need {gib(needed[where])} on {where} beside the live ones, which has {gib(free)} free"
            )
    if reasons:
        raise ReshardRefused(reasons[0])
    return facts


def _pooled(sharded: ShardedModel, modules: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns digests of the last batch's pooled vectors, by module and key, without running hooks. Collective."""
    found = {}
    with torch.no_grad():
        for path, module in modules.items():
            if path in sharded.last_features:
                inputs, by_name = sharded.last_features[path]
                pooled = type(module).forward(module, *inputs, **by_name).wait()
                found[path] = {key: digest(vectors) for key, vectors in pooled.to_dict().items()}
    return found


def _settings(sharded: ShardedModel, path: str, facts: Mapping[ShardName, _Facts]) -> Callable[[ShardName], Settings]:
    """Returns a function from the name of a module's shard, old or new, to its table's settings."""
    of_table = {name.table: fact.settings for name, fact in facts.items()}
    return lambda name: of_table[table_key(path, name.table, sharded.collections)]


def _restore(sharded: ShardedModel, modules: Mapping[str, Any], facts: Mapping[ShardName, _Facts]) -> None:
    for path, module in modules.items():
        restore_settings(module, _settings(sharded, path, facts))


def _what_differs(
    sharded: ShardedModel,
    changed: Mapping[str, Any],
    old: Mapping[ShardName, Shard],
    pooled: Mapping[str, Mapping[str, str]],
) -> str | None:
    """Returns in words what has changed among rows that stayed and vectors looked up; None if nothing. Collective."""
    now, here = _pooled(sharded, changed), f"on rank {sharded.runtime.rank}"
    for name, shard in _shards(sharded, changed).items():
        if name in old and any(not torch.equal(value, old[name].tensors[t]) for t, value in shard.tensors.items()):
            return f"table '{name}', which stays, has changed {here}"
    for path, before in pooled.items():
        other = [key for key, said in before.items() if now[path].get(key) != said]
        if other:
            return f"'{path}' returns other vectors for feature '{other[0]}' {here}"
    return None


Sums = Mapping[tuple[ShardName, str], int]


def _wrong(said: Sequence[tuple[Sums, Sums, str | None]]) -> str | None:
    """Returns the first reason to undo a move from all ranks' reports; None if there is none."""
    left = {key: value for before, _, _ in said for key, value in before.items()}
    arrived = {key: value for _, after, _ in said for key, value in after.items()}
    damaged = [f"table '{table}' changed on its way ({tensor})" for (table, tensor), value in left.items()
               if arrived.get((table, tensor)) != value]  # fmt: skip
    return next(iter([*damaged, *(reason for _, _, reason in said if reason)]), None)


def _try(attempt: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return attempt(), None
    except (RuntimeError, ValueError, MemoryError, AssertionError, UserError) as error:
        return None, error


def _all_well(sharded: ShardedModel, doing: str, failure: Exception | None) -> None:
    """Raises ReshardRefused on all ranks if one has failed."""
    for rank, said in enumerate(sharded.runtime.all_gather(None if failure is None else str(failure))):
        if said is not None:
            raise ReshardRefused(f"rank {rank} could not {doing}: {said}")
