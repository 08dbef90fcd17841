"""Makes the placement task and the planner that a planning command's arguments describe.

task = task_of(pool, None, devices=8, arguments=arguments, may_split=False)
planner = planner_of("auto", seed=0)                     # or a directory made by `fit`
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.words import count

if TYPE_CHECKING:
    from dlrm_autoshard.config import Config
    from dlrm_autoshard.plan import Topology
    from dlrm_autoshard.planner.dreamshard.pool import TablePool
    from dlrm_autoshard.planner.planner import Planner
    from dlrm_autoshard.planner.task import PlacementTask
    from dlrm_autoshard.records.run import RunRecord
    from dlrm_autoshard.tables import TableOptimizer

STATE_FILE = "planner.json"
_MOST_INTERVALS, _LEAST_SAMPLES = 6, 3
"""How many of a run's last intervals are learned from, and the fewest sampled steps that an interval needs."""


@dataclass(frozen=True)
class OfRun:
    """The tables of a run, its settings, each rank's host by name, and its global batch."""

    pool: TablePool
    config: Config
    hosts: tuple[str, ...]
    batch_size: int


def topology_of(devices: int, memory_gib: float | None) -> Topology:
    """Returns the topology that --devices and --memory-gib describe."""
    from dlrm_autoshard.plan import Topology

    check_devices(devices, memory_gib)
    return Topology(devices, None if memory_gib is None else (int(memory_gib * 2**30),) * devices)


def check_devices(devices: int, memory_gib: float | None) -> None:
    """Raises UserError if --devices or --memory-gib is out of range."""
    if devices < 1:
        raise UserError(f"--devices is {devices}; it must be 1 or more.")
    if memory_gib is not None and not 0 < memory_gib < 2**30:
        raise UserError(f"--memory-gib is {memory_gib:g}; it must be more than 0 and less than {2**30:,}.")


def task_of(
    pool: TablePool, of_run: OfRun | None, devices: int, arguments: argparse.Namespace, *, may_split: bool
) -> PlacementTask:
    """Returns the task of placing these tables on `devices` ranks.

    of_run: the run they come from. Its memory, pins, groups, excluded ranks, splits and optimizer are the defaults of
    the arguments; its hosts count if it had as many ranks. may_split: allow splits whatever the optimizer."""
    from dlrm_autoshard.autoshard.asked import check_settings, constraints_of, memory_asked, splits_of
    from dlrm_autoshard.config import AutoshardConfig, TableOptimizerConfig
    from dlrm_autoshard.plan import Topology

    check_devices(devices, arguments.memory_gib)
    settings, optimizer, hosts = AutoshardConfig(), TableOptimizerConfig(), None
    if of_run is not None:
        settings, optimizer = of_run.config.autoshard, of_run.config.tables.optimizer
        if len(of_run.hosts) == devices:
            hosts = tuple(map(list(dict.fromkeys(of_run.hosts)).index, of_run.hosts))
    if arguments.memory_gib is not None:
        settings = settings.model_copy(update={"memory_gib": arguments.memory_gib})
    check_settings(settings, [table.name for table in pool.tables], devices)
    asked = {key: value for key in ("max_parts", "min_dim", "rows") if (value := getattr(arguments, key)) is not None}
    settings = settings.model_copy(
        update={
            "pinned": {**settings.pinned, **pins_of(arguments.pin)},
            "together": [*settings.together, *(group.split(",") for group in arguments.together)],
            "apart": [*settings.apart, *(group.split(",") for group in arguments.apart)],
            "splits": settings.splits.model_copy(update=asked),
        }
    )
    if arguments.optimizer is not None:
        optimizer = optimizer.model_copy(update={"name": arguments.optimizer})
    splits = splits_of(settings, optimizer)
    return pool.task(
        Topology(devices, memory_asked(settings, devices), excluded=frozenset(settings.exclude_ranks), hosts=hosts),
        arguments.batch_size or (None if of_run is None else of_run.batch_size),
        constraints_of(settings),
        replace(splits, allowed=splits.allowed or may_split),
    )


def pins_of(pins: Sequence[str]) -> dict[str, int]:
    """Parses --pin TABLE=RANK into ranks by table."""
    pinned = {}
    for pin in pins:
        table, equals, rank = pin.rpartition("=")
        if not equals or not re.fullmatch("[0-9]{1,9}", rank):
            raise UserError(f"--pin '{pin}' must have the form TABLE=RANK, such as --pin user=0.")
        pinned[table] = int(rank)
    return pinned


def learn_from(planner: Planner, record: RunRecord, of_run: OfRun, task: PlacementTask) -> None:
    """Corrects the planner's costs by the run's last intervals, as the job itself did.

    Does nothing if the task has another optimizer or number of ranks than the run."""
    from dlrm_autoshard.costs import StepProfile
    from dlrm_autoshard.records.facts import pooling_of_tables

    if task.splits.optimizer != of_run.config.tables.optimizer.name or task.world_size != record.last.world_size:
        return
    kept = [profile for profile in record.intervals[-_MOST_INTERVALS:] if profile.samples >= _LEAST_SAMPLES]
    pool = of_run.pool
    for profile in kept:
        pooling = pooling_of_tables(profile.tables)
        if pooling.keys() != {table.name for table in pool.tables} or profile.world_size != task.world_size:
            continue
        stats = tuple(
            replace(stat, mean_pooling=pooling[table.name]) for table, stat in zip(pool.tables, pool.stats, strict=True)
        )
        noise, ranks = profile.noise / profile.samples**0.5, profile.measured
        planner.costs.observe(
            StepProfile(profile.plan, pool.tables, stats, profile.batch_size, ranks, "measured", noise), task.topology
        )
    if kept:
        planner.costs.costs_from += f", corrected by {count(len(kept), 'interval')} of the run"


def planner_of(
    algorithm: str,
    seed: int,
    fitted: Path | None = None,
    *,
    optimizer: TableOptimizer = "rowwise_adagrad",
    device: str = "cpu",
    shipped: bool = True,
) -> Planner:
    """Returns a planner ready to plan.

    algorithm: a name, or a directory made by `fit`. fitted: a directory made by `fit` with costs and policies for a
    named algorithm; default: the shipped ones for this optimizer and device, whether or not this machine has such a
    device. shipped=False: no costs of any machine. Sets this process to one thread, as ranks are, so that it measures
    what a rank would take."""
    import torch

    from dlrm_autoshard.formats.json_file import read_json
    from dlrm_autoshard.planner.planner import ALGORITHMS, Planner
    from dlrm_autoshard.planner.saved_state import PlannerRecord, load_planner
    from dlrm_autoshard.probe.hardware import hardware_fingerprint
    from dlrm_autoshard.probe.shipped_costs import start_warm

    torch.set_num_threads(1)
    named = algorithm in ALGORITHMS
    if not named and fitted is not None:
        raise UserError(
            f"--algorithm '{algorithm}' is not one of {', '.join(ALGORITHMS)}, so it cannot take --fitted. A directory "
            "made by `fit` goes either to --algorithm or to --fitted."
        )
    if named and fitted is None:
        planner = Planner(algorithm, seed=seed)
        if shipped:
            here = device == "cpu" or torch.cuda.is_available()
            fingerprint = hardware_fingerprint(torch.device(device)) if here else {"device": device}
            start_warm(planner, fingerprint, optimizer)
        return planner
    file = (Path(algorithm) if fitted is None else fitted) / STATE_FILE
    if not file.is_file():
        unknown = "" if named else f", and is not one of the algorithms {', '.join(ALGORITHMS)}"
        raise UserError(
            f"'{file.parent}' holds no fitted planner ({STATE_FILE}){unknown}. Make one with `dlrm-autoshard fit`."
        )
    if not named:
        algorithm = read_json(file, PlannerRecord, "planner file")["algorithm"]
        if algorithm not in ALGORITHMS:
            raise UserError(f"planner file '{file}': there is no algorithm '{algorithm}'.")
    planner = Planner(algorithm, seed=seed)
    load_planner(planner, file)
    if planner.makers.by_reference and algorithm != "dreamshard":
        raise UserError(
            f"'{file.parent}' was made by `fit --reference`, which learns nothing that '{algorithm}' can use. Make one "
            "without --reference."
        )
    return planner
