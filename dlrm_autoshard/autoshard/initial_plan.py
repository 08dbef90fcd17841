"""The plan a job starts with: round-robin, a file's, or the planner's; decided on rank 0, the same on every rank.

placement = place(config, runtime, source)
placement.plan, placement.stats, placement.result            # result: the planner's evidence, on rank 0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import torch

from dlrm_autoshard.config import AutoshardConfig, Config
from dlrm_autoshard.data.batch import DataSource
from dlrm_autoshard.distributed.runtime import Runtime
from dlrm_autoshard.distributed.shared_memory import place as place_of_process
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import Constraints, PlanError, ShardingPlan, Topology, check_plan, round_robin
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.result import PlanResult
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import start_costs
from dlrm_autoshard.probe.hardware import hardware_fingerprint
from dlrm_autoshard.probe.plan_probe import RankProbe
from dlrm_autoshard.probe.shard_probe import ShardProbe
from dlrm_autoshard.tables import TableStats, measure_table_stats, memory_bytes

T = TypeVar("T")
_MEMORY_SHARE = 0.9  # of what is free; the rest is for activations and the system
_STATS_SAMPLES = 1 << 16  # samples from which statistics are measured, at most


@dataclass(frozen=True)
class Placement:
    """stats and table_bytes are in the tables' order; planner and result are rank 0's, where there is a planner."""

    plan: ShardingPlan
    stats: tuple[TableStats, ...]
    topology: Topology
    constraints: Constraints
    table_bytes: dict[str, int]
    planner: Planner | None
    result: PlanResult | None


def place(config: Config, runtime: Runtime, source: DataSource, current: ShardingPlan | None = None) -> Placement:
    """Decides on rank 0 and tells the others. PlanError, on every rank, before anything is allocated, where tables
    do not fit. current: the plan of a checkpoint that is being resumed, taken as it is where it is for these ranks."""
    global_batch = config.train.batch_size * runtime.world_size
    stats = from_rank_0(runtime, lambda: measure_stats(source, global_batch, config.autoshard.stats_batches))
    topology = find_topology(config.autoshard, runtime)
    constraints = Constraints(
        config.autoshard.pinned,
        tuple(tuple(group) for group in config.autoshard.together),
        tuple(tuple(group) for group in config.autoshard.apart),
    )
    table_bytes = memory_bytes(source.tables, stats, config.tables.optimizer.name, global_batch)
    task = PlacementTask.build(
        source.tables, stats, topology, batch_size=global_batch, table_bytes=table_bytes, constraints=constraints
    )
    names = [table.name for table in source.tables]
    settled = current is not None and current.world_size == runtime.world_size
    planning, given = config.autoshard.enabled and not settled, config.autoshard.placement
    planner = make_planner(config) if config.autoshard.enabled and runtime.rank == 0 else None
    probe = None
    if planning and config.autoshard.measure_plans > 0 and runtime.world_size > 1:
        shards = ShardProbe(
            config.tables.optimizer.name, runtime.device, buffer_gib=0.25, repeats=3, seconds_per_shard=0.1
        )
        exchange_dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        probe = RankProbe(
            runtime, source.tables, stats, global_batch, shards, exchange_dtype[config.train.exchange_dtype]
        )

    def decide() -> tuple[ShardingPlan, PlanResult | None]:
        if planning and planner is not None:
            cache_dir = config.autoshard.cache_dir
            started = start_costs(
                planner,
                source.tables,
                stats,
                global_batch,
                world_size=runtime.world_size,
                fingerprint=hardware_fingerprint(runtime.device),
                measure_shards=None if probe is None else probe.measure_shards,
                cache_dir=None if cache_dir is None else Path(cache_dir),
                budget_seconds=config.autoshard.budget_seconds,
                seed=config.run.seed,
            )
            if given is None:
                result = planner.plan(
                    task,
                    measure=None if probe is None else probe.measure,
                    measure_plans=config.autoshard.measure_plans,
                    budget_seconds=max(0.0, config.autoshard.budget_seconds - started.seconds),
                )
                return result.plan.ordered(names), result
        file = None
        if settled and current is not None:
            plan = current
        elif given is None or given == "round_robin":
            plan = round_robin(names, topology)
        else:
            file = Path(given)
            plan = ShardingPlan.load(file)
        try:
            check_plan(plan, table_bytes, topology, constraints)
        except PlanError as error:
            raise PlanError(f"plan file '{file}': {error}" if file else str(error)) from error
        return plan.ordered(names), None

    plan, result = from_rank_0(runtime, decide, probe)
    return Placement(plan, stats, topology, constraints, table_bytes, planner, result)


def make_planner(config: Config) -> Planner:
    return Planner(config.autoshard.algorithm, seed=config.run.seed)


def from_rank_0(runtime: Runtime, decide: Callable[[], T], probe: RankProbe | None = None) -> T:
    """What `decide` returns on rank 0, on every rank; an error for people that it raises there, everywhere.

    probe: what `decide` measures with; the other ranks serve it meanwhile.
    """

    def attempt() -> tuple[T | None, UserError | None]:
        try:
            return decide(), None
        except UserError as error:
            return None, error

    outcome = None
    if probe is not None:
        outcome = probe.on_rank_zero(attempt)
    elif runtime.rank == 0:
        outcome = attempt()
    value, failure = runtime.broadcast(outcome)
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


def measure_stats(source: DataSource, global_batch: int, batches: int) -> tuple[TableStats, ...]:
    """Statistics of each table from the first batches of training data, each looked at as one global batch."""
    total = source.num_samples("train")
    size = min(global_batch, total, _STATS_SAMPLES)
    count = max(1, min(batches, total // size, _STATS_SAMPLES // size))
    seen = []
    for index in range(count):
        batch = source.read("train", 0, index * size, (index + 1) * size)
        seen.append(measure_table_stats(batch.lengths_TB.numpy(), batch.values_N.numpy()))
    return tuple(average_stats(table) for table in zip(*seen, strict=True))


def average_stats(stats: Sequence[TableStats]) -> TableStats:
    histogram = np.mean([stat.reuse_histogram for stat in stats], axis=0)
    return TableStats(
        float(np.mean([stat.mean_pooling for stat in stats])),
        tuple(float(share) for share in histogram),
        float(np.mean([stat.mean_reuse for stat in stats])),
        stats[0].batch_size,
    )


def find_topology(config: AutoshardConfig, runtime: Runtime) -> Topology:
    """Memory as configured, else what is free on each rank's device now; which ranks share a host."""
    if config.memory_gib is None:
        free = runtime.all_gather(int(_MEMORY_SHARE * free_memory(runtime)))
    elif isinstance(config.memory_gib, list):
        free = [int(gib * 2**30) for gib in config.memory_gib]
    else:
        free = [int(config.memory_gib * 2**30)] * runtime.world_size
    places = runtime.all_gather(place_of_process())
    hosts = tuple(list(dict.fromkeys(places)).index(place) for place in places)
    return Topology(runtime.world_size, tuple(free), excluded=frozenset(config.exclude_ranks), hosts=hosts)


def free_memory(runtime: Runtime) -> int:
    """Bytes this rank may use: of its GPU, or its share of the host's."""
    if runtime.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(runtime.device)
        return int(free)
    return int(psutil.virtual_memory().available / runtime.local_world_size)
