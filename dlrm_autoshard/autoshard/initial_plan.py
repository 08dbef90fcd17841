"""The plan a job starts with: round-robin, a file's, or the planner's; decided on rank 0, the same on every rank.

placement = place(settings, runtime, tables, find_stats, batch_size=4096, optimizer=optimizer, exchange_dtype=dtypes)
placement.plan, placement.task, placement.result            # result: the planner's evidence, on rank 0
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.asked import (
    check_settings,
    constraints_of,
    given_plan,
    memory_asked,
    reshards,
    splits_of,
)
from dlrm_autoshard.config import AutoshardConfig, ExchangeDtypes, TableOptimizerConfig
from dlrm_autoshard.distributed.lookup.shared_memory import host_id
from dlrm_autoshard.distributed.ranks.free_memory import free_memory
from dlrm_autoshard.distributed.ranks.runtime import Runtime, name_of
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.result import PlanResult
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import cost_log, keep_profiles, start_costs
from dlrm_autoshard.probe.hardware import hardware_fingerprint
from dlrm_autoshard.probe.rank_probe import RankProbe
from dlrm_autoshard.probe.shipped_costs import start_warm
from dlrm_autoshard.records.jsonl import append_jsonl
from dlrm_autoshard.records.plans import write_plan
from dlrm_autoshard.tables import TableConfig, TableStats, memory_bytes


@dataclass(frozen=True)
class Placement:
    """The initial plan. task: the tables and ranks. planner, result: on rank 0 only, if a planner was used. why: the
    reason, for people."""

    plan: ShardingPlan
    task: PlacementTask
    planner: Planner | None
    result: PlanResult | None
    why: str

    def save(self, run_dir: Path, step: int) -> None:
        """Writes the plan and, if it was planned, the evidence for it; only rank 0 writes."""
        write_plan(run_dir, step, self.plan)
        if self.result is not None:
            known = {"step": step, "budget_bytes": self.task.topology.memory_bytes, **self.result.to_json()}
            append_jsonl(run_dir / "plan" / "evidence.jsonl", known)


def place(
    settings: AutoshardConfig,
    runtime: Runtime,
    tables: Sequence[TableConfig],
    find_stats: Callable[[], Sequence[TableStats]],
    *,
    batch_size: int,
    optimizer: TableOptimizerConfig,
    exchange_dtype: ExchangeDtypes,
    shared_memory: bool = True,
    steps: int | None = None,
    interval_steps: int | None = None,
    seed: int = 0,
    current: ShardingPlan | None = None,
    stays: bool = False,
    held_bytes: int = 0,
    reserved_bytes: int = 0,
    on_host: bool = False,
    costs_dir: Path | None = None,
) -> Placement:
    """Decides on rank 0, by measurements on these ranks, and tells the others. PlanError on every rank, before anything
    is allocated, if tables do not fit.

    find_stats: returns each table's statistics; called on rank 0 once the settings are checked. batch_size: over all
    ranks. shared_memory: whether ranks of a host exchange through it. steps: of the job, if known; interval_steps:
    steps until the first resharding decision, which learns from steps for free. current: a plan to keep if it is legal
    on these ranks; stays: keep it in any case, as nothing moves. held_bytes: bytes that tables already take on this
    rank and may take again. reserved_bytes: per rank, for replicas. on_host: tables will lie in host memory, even
    beside a GPU. costs_dir: directory for measurements if the settings name none.
    """
    if interval_steps is not None and reshards(settings, runtime.world_size):
        steps = interval_steps if steps is None else min(steps, interval_steps)
    check_settings(settings, [table.name for table in tables], runtime.world_size)
    stats = runtime.from_rank_0(find_stats)
    task = PlacementTask.build(
        tables,
        stats,
        find_topology(settings, runtime, held_bytes, reserved_bytes, on_host=on_host),
        batch_size=batch_size,
        table_bytes=memory_bytes(tables, stats, optimizer.name, batch_size),
        constraints=constraints_of(settings),
        splits=splits_of(settings, optimizer),
    )
    places = settings.enabled and runtime.world_size > 1  # one rank holds all tables, whoever plans
    planner = None
    if places and runtime.rank == 0:
        planner = Planner(settings.algorithm, seed=seed)
    settled = current if current is not None and current.world_size == runtime.world_size else None
    if settled is not None and not stays and not (task.splits_enough(settled) and task.allows(settled)):
        settled = None  # other memory, constraints, splits or optimizer than when it was made
    planning = places and settled is None
    probe = None
    if planning and settings.measure_plans > 0:
        probe = RankProbe.at_start(runtime, task, optimizer.name, exchange_dtype, shared_memory)

    def decide() -> tuple[ShardingPlan, PlanResult | None]:
        started, fingerprint = time.perf_counter(), hardware_fingerprint(runtime.device)
        exchange = str(exchange_dtype) + (" by shared memory" if shared_memory else "")
        cache_dir = costs_dir if settings.cache_dir == "auto" else settings.cache_dir
        log = cost_log(cache_dir, task, fingerprint, exchange=exchange)
        if planning and planner is not None:
            seconds_left = start_costs(
                planner,
                task,
                fingerprint=fingerprint,
                measure_shards=None if probe is None else probe.measure_shards,
                log=log,
                budget_seconds=settings.budget_seconds,
                steps=steps,
                seed=seed,
            )
            if settings.placement is None:
                result = planner.plan(
                    task,
                    measure=None if probe is None else probe.measure,
                    measure_plans=settings.measure_plans,
                    budget_seconds=seconds_left,
                    steps=steps,
                )
                keep_profiles(log, planner, task)
                return result.plan.ordered(task.names), replace(result, seconds=time.perf_counter() - started)
        elif planner is not None:  # resharding decides by its costs all the same
            start_warm(planner, fingerprint, optimizer.name)
        return (settled or given_plan(settings.placement, task)).ordered(task.names), None

    plan, result = runtime.from_rank_0(decide, None if probe is None else probe.on_rank_zero)
    if not stays:
        task.check(plan)
    return Placement(plan, task, planner, result, _why(settings, runtime.world_size, settled, result))


def _why(settings: AutoshardConfig, world_size: int, settled: ShardingPlan | None, result: PlanResult | None) -> str:
    """Returns why tables lie where they do, and whether they stay there. result: rank 0's."""
    if world_size == 1:
        return "one rank holds all tables"
    stays = "tables may move while it trains"
    if not reshards(settings, world_size):
        key = "autoshard.reshard.enabled" if settings.enabled else "autoshard.enabled"
        stays = f"tables stay there ({key} is false)"
    if settled is not None:
        return f"as before; {stays}"
    if result is not None:
        return f"planned in {result.seconds:.1f} s by '{result.algorithm}'; {stays}"
    if settings.placement not in (None, "round_robin"):
        return f"by '{settings.placement}' (autoshard.placement); {stays}"
    return f"round robin; {stays}"


def find_topology(
    settings: AutoshardConfig, runtime: Runtime, held_bytes: int = 0, reserved_bytes: int = 0, *, on_host: bool = False
) -> Topology:
    """Returns the ranks with their hosts and memory: as configured, else each rank's share of what is free where its
    tables will be plus what they hold there, minus `reserved_bytes`. Collective."""
    device = torch.device("cpu") if on_host else runtime.device
    places = runtime.all_gather((host_id(), name_of(device)))
    if (memory := memory_asked(settings, runtime.world_size)) is None:
        own_share = free_memory(device) // places.count(places[runtime.rank])
        memory = tuple(runtime.all_gather(int(thresholds.MEMORY_SHARE * (own_share + held_bytes))))
    memory = tuple(max(0, own - reserved_bytes) for own in memory)
    ids = [host for host, _ in places]
    hosts = tuple(list(dict.fromkeys(ids)).index(one) for one in ids)
    return Topology(runtime.world_size, memory, excluded=frozenset(settings.exclude_ranks), hosts=hosts)
