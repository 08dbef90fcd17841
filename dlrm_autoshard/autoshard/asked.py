"""Translates the `autoshard:` section into constraints on plans, checked against tables and ranks. No rank runs.

check_settings(settings, ["user", "item"], world_size=2)           # PlanError: pinned to rank 7 of 2
"""

from __future__ import annotations

from pathlib import Path

from dlrm_autoshard.config import AutoshardConfig, TableOptimizerConfig
from dlrm_autoshard.plan import Constraints, PlanError, ShardingPlan, round_robin
from dlrm_autoshard.planner.task import PlacementTask, Splits
from dlrm_autoshard.tables import Shard


def reshards(settings: AutoshardConfig, world_size: int) -> bool:
    """Returns whether tables may move during training."""
    return settings.enabled and settings.reshard.enabled and world_size > 1


def check_settings(settings: AutoshardConfig, tables: list[str], world_size: int) -> None:
    """Raises PlanError with the key if a setting names a table or a rank that does not exist."""
    named = {"pinned": list(settings.pinned)}
    named |= {key: [table for group in getattr(settings, key) for table in group] for key in ("together", "apart")}
    for key, names in named.items():
        unknown = [name for name in names if Shard(name).table not in tables]
        if unknown:
            some = ", ".join(tables[:8]) + (", ..." if len(tables) > 8 else "")
            raise PlanError(
                f"autoshard.{key} names table '{unknown[0]}', which the model does not have; it has {some}."
            )
    ranks = f"but there are {world_size} ranks (0 to {world_size - 1})"
    for table, rank in settings.pinned.items():
        if rank >= world_size:
            raise PlanError(f"autoshard.pinned puts table '{table}' on rank {rank}, {ranks}.")
    for rank in settings.exclude_ranks:
        if rank >= world_size:
            raise PlanError(f"autoshard.exclude_ranks names rank {rank}, {ranks}.")
    if isinstance(settings.memory_gib, list) and len(settings.memory_gib) != world_size:
        raise PlanError(
            f"autoshard.memory_gib has {len(settings.memory_gib)} entries, but there are {world_size} ranks. "
            "Give one for each rank, or a single number for all."
        )


def memory_asked(settings: AutoshardConfig, world_size: int) -> tuple[int, ...] | None:
    """Returns the bytes for tables on each rank if the settings give them, else None."""
    gib = settings.memory_gib
    if gib is None:
        return None
    return tuple(int(own * 2**30) for own in (gib if isinstance(gib, list) else [gib] * world_size))


def constraints_of(settings: AutoshardConfig) -> Constraints:
    """Returns the settings' constraints on plans."""
    return Constraints(settings.pinned, tuple(map(tuple, settings.together)), tuple(map(tuple, settings.apart)))


def splits_of(settings: AutoshardConfig, optimizer: TableOptimizerConfig) -> Splits:
    """Returns the ways in which tables may be split."""
    asked = settings.splits
    rows, faster = asked.rows != "never", asked.rows == "faster"
    return Splits(asked.max_parts, asked.min_dim, optimizer.splits_tables, optimizer.name, rows, faster)


def given_plan(placement: str | None, task: PlacementTask) -> ShardingPlan:
    """Returns the plan of a file, or round-robin without one. PlanError if it breaks memory limits or constraints."""
    if placement is None or placement == "round_robin":
        return round_robin(task.names, task.topology)
    plan = ShardingPlan.load(Path(placement))
    try:
        task.check(plan)
    except PlanError as error:
        raise PlanError(f"plan file '{placement}': {error}") from error
    return plan
