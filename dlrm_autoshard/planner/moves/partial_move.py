"""Chooses which part of a move comes first, where the whole is larger than may move at a time.

    bytes_of = moving_bytes(plan, target, bytes_of, tables)
    part = first_part(plan, target, bytes_of, max_bytes, cost_ms, legal)

Pure arithmetic; `cost_ms` predicts, `legal` says whether memory and constraints allow a plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from dlrm_autoshard.formats.words import gib
from dlrm_autoshard.plan import Constraints, PlanError, ShardingPlan
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.tables import Shard, TableConfig

Group = tuple[str, ...]
MOST_WEIGHED = 40
"""Groups of tables that are weighed against each other for a part: the time grows with their square."""


def moving_bytes(
    plan: ShardingPlan, target: ShardingPlan, bytes_of: Mapping[str, int], tables: Sequence[TableConfig]
) -> dict[str, int]:
    """Returns the bytes that move of each table, over all its shards. bytes_of: bytes of whole tables."""
    wholes, found = {table.name: table for table in tables}, dict[str, int]()
    for move in plan.moves_to(target):
        shard, whole = move.shard, wholes[move.shard.table]
        part = whole.holding(shard)
        share = part.num_embeddings * part.embedding_dim
        moved = -(-bytes_of[shard.table] * share // (whole.num_embeddings * whole.embedding_dim))
        found[shard.table] = found.get(shard.table, 0) + moved
    return found


def movable(task: PlacementTask, plan: ShardingPlan, bytes_of: Mapping[str, int], max_bytes: int) -> PlacementTask:
    """Returns the task with tables pinned that no single move can carry, alone (by halves if they may be split) or
    with the tables that must stay with them, so that a search finds only what is reachable. PlanError if this pins
    all of them."""
    now, stay = task.split_as(plan), dict[str, int]()
    groups = _groups(list(plan.tables), task.constraints)
    size_of = {table: _size(group, bytes_of) for group in groups if len(group) > 1 for table in group}
    least_of: dict[str, int] = {}
    for name in plan.shards:
        whole, shard = now.shard(Shard(name.table))[0], now.shard(name)[0]
        least, *_ = now.halves(name) or (shard,)
        of_part = round(bytes_of[whole.name] * least.weight_bytes / whole.weight_bytes)
        least_of[name] = size_of.get(whole.name, of_part)
        if least_of[name] > max_bytes:
            stay[name] = plan.rank_of[name]
    if len(stay) == len(plan.rank_of):
        smallest = min(least_of, key=least_of.__getitem__)
        raise PlanError(
            f"at most {gib(max_bytes)} may move at a time, and the smallest of what moves, '{smallest}', has "
            f"{gib(least_of[smallest])}"
        )
    pinned = stay | dict(task.constraints.pinned)
    return replace(task, constraints=replace(task.constraints, pinned=pinned))


def first_part(
    plan: ShardingPlan,
    target: ShardingPlan,
    bytes_of: Mapping[str, int],
    max_bytes: int,
    cost_ms: Callable[[ShardingPlan], float],
    legal: Callable[[ShardingPlan], bool],
    constraints: Constraints = Constraints(),
) -> ShardingPlan | str:
    """Returns the part of the way to `target` that moves first, or why there is none. Training continues between parts,
    so each part is a legal plan that is predicted to be no slower than now. bytes_of: bytes that move of each table;
    all shards of a table are split or merged at once.

    Tables move one by one, each time the one that leaves the least cost; two at once if none may move alone (two full
    ranks swap). The part is the best plan on the way.
    """
    groups = _groups(list(dict.fromkeys(move.shard.table for move in plan.moves_to(target))), constraints)
    too_large = [group for group in groups if _size(group, bytes_of) > max_bytes]
    if not groups:
        return "no table moves"
    if len(too_large) == len(groups):
        smallest = min(too_large, key=lambda group: _size(group, bytes_of))
        named = " and ".join(f"'{table}'" for table in smallest)
        return f"the smallest of what moves, {named}, has {gib(_size(smallest, bytes_of))}"
    waiting = [group for group in groups if group not in too_large]
    if len(waiting) > MOST_WEIGHED:  # those that help most by themselves
        waiting = sorted(waiting, key=lambda group: cost_ms(_moved(plan, target, group)))[:MOST_WEIGHED]
    now, best, best_ms = plan, None, cost_ms(plan)
    left = max_bytes
    while True:
        steps = list(_steps(now, target, waiting, left, bytes_of, legal))
        if not steps:
            break
        ms, chosen = min(((cost_ms(_moved(now, target, tables)), tables) for tables in steps), key=lambda s: s[0])
        now, left = _moved(now, target, chosen), left - _size(chosen, bytes_of)
        waiting = [group for group in waiting if group[0] not in chosen]
        if ms <= best_ms:
            best, best_ms = now, ms
    return best or "no part of it that small is legal and as fast as the current plan"


def _steps(
    plan: ShardingPlan,
    target: ShardingPlan,
    waiting: Sequence[Group],
    max_bytes: int,
    bytes_of: Mapping[str, int],
    legal: Callable[[ShardingPlan], bool],
) -> Iterable[Group]:
    """Yields groups that may move next, or pairs of groups if no single one may."""
    pairs = (one + other for one, other in itertools.combinations(waiting, 2))
    for choices in (waiting, pairs):
        found = [
            tables for tables in choices if _size(tables, bytes_of) <= max_bytes and legal(_moved(plan, target, tables))
        ]
        if found:
            return found
    return []


def _groups(tables: Sequence[str], constraints: Constraints) -> list[Group]:
    """Groups tables that must stay together."""
    group_of: dict[str, set[str]] = {table: {table} for table in tables}
    for together in constraints.together:
        names = [constraints.named[name].table for name in together]  # all parts of a table move at once
        merged = set().union(*(group_of[table] for table in names if table in group_of))
        for table in merged:
            group_of[table] = merged
    return list(dict.fromkeys(tuple(t for t in tables if t in group_of[table]) for table in tables))


def _moved(plan: ShardingPlan, target: ShardingPlan, tables: Iterable[str]) -> ShardingPlan:
    chosen = set(tables)
    mixed: dict[str, int] = {}
    for table in plan.tables:
        of = target if table in chosen else plan
        mixed |= {shard: of.rank_of[shard] for shard in of.parts_of(table)}
    return ShardingPlan(mixed, plan.world_size)


def _size(tables: Iterable[str], bytes_of: Mapping[str, int]) -> int:
    return sum(bytes_of[table] for table in tables)
