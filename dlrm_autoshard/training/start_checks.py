"""Checks a job's settings against its data and machine, before anything is planned, measured or allocated.

check_start(config, ranks=2)          # before any rank runs: all mistakes in one UserError
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from dlrm_autoshard.autoshard.asked import check_settings as check_asked
from dlrm_autoshard.autoshard.asked import constraints_of, given_plan, memory_asked, splits_of
from dlrm_autoshard.config import Config
from dlrm_autoshard.config_data import CustomData, SyntheticData
from dlrm_autoshard.data.batch import DataSource
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.distributed.lookup.shared_memory import host_id
from dlrm_autoshard.distributed.lookup.wire import exchange_bytes
from dlrm_autoshard.distributed.ranks.free_memory import free_memory
from dlrm_autoshard.distributed.ranks.runtime import Runtime, check_threads, choose_device, name_of
from dlrm_autoshard.distributed.tables.init import check_file
from dlrm_autoshard.distributed.tables.optimizers import check_optimizers
from dlrm_autoshard.errors import UserError, in_a_sentence
from dlrm_autoshard.formats.words import gib
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.plan.replicated import replicated_tables
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.plug_in import check_place
from dlrm_autoshard.tables import Shard, TableStats
from dlrm_autoshard.training.callbacks import check_callbacks
from dlrm_autoshard.training.checkpoints.folder import CheckpointFolder, run_and_checkpoint
from dlrm_autoshard.training.run_directory import check_run_dir, run_to_continue
from dlrm_autoshard.training.selection import Selection
from dlrm_autoshard.training.state import Position

T = TypeVar("T")

_COPIES = 4
"""Copies of the dense weights: themselves, gradients, and at most two of optimizer state."""
_MEASURED = 64  # samples


def check_start(config: Config, ranks: int, resume: str | None = None) -> DataSource | None:
    """Raises a UserError with a line for each mistake that is visible before ranks start; returns the opened data.

    resume: what the job's first start resumes. Users' code is located but not run; with a custom source returns None.
    """
    wrong: list[str] = []

    def attempt(check: Callable[[], T]) -> T | None:
        try:
            return check()
        except Exception as error:
            said = in_a_sentence(error)
            if said is None:
                raise
            wrong.append(said)
            return None

    attempt(lambda: check_threads(config.run))
    device = attempt(lambda: choose_device(config.run.device, local_rank=0))
    attempt(lambda: check_callbacks(config.callbacks))
    attempt(lambda: check_run_dir(config) if resume is None else check_resume(config, resume))
    if config.model.factory is not None:
        factory = config.model.factory
        attempt(lambda: check_place(factory, "model.factory"))
    if device is not None:
        attempt(lambda: check_optimizers([config.tables.optimizer], device))
    source = attempt(lambda: _source_of(config))
    if source is not None:
        attempt(lambda: check_own(source, device, files=resume is None))
        attempt(lambda: check_splits(config, source))
        attempt(lambda: check_placement(config, source, ranks))
        if device is not None and device.type == "cpu":  # a launcher must not touch the GPU
            attempt(lambda: check_sizes(config, source, ranks, free_memory(), ranks))
    if wrong:
        raise UserError("\n".join(wrong))
    return source


def _source_of(config: Config) -> DataSource | None:
    if isinstance(config.data, CustomData):
        check_place(config.data.factory, "data.factory")
        return None
    return open_source(config.data, config.tables)


def check_resume(config: Config, resume: str) -> None:
    """Raises UserError if the run or an intact checkpoint that `--resume` names does not exist."""
    asked, checkpoint = run_and_checkpoint(resume)
    run = run_to_continue(config, asked, frozenset())
    assert run is not None  # --resume was given
    CheckpointFolder(run / "checkpoints").choose(checkpoint, fall_back=False)


def check_placement(config: Config, source: DataSource, ranks: int) -> None:
    """Raises UserError if constraints, or a given plan, do not fit these tables and ranks. Ranks check free memory
    later."""
    settings = config.autoshard
    features = Features.of(source.tables, config.tables.shared, config.tables.sequences)
    replicated = replicated_of(config, features, ranks)
    tables = [table for table in features.tables if table.name not in replicated]
    check_asked(settings, [table.name for table in tables], ranks)
    task = PlacementTask.build(
        tables,
        [TableStats(1.0)] * len(tables),
        Topology(ranks, memory_asked(settings, ranks), excluded=frozenset(settings.exclude_ranks)),
        batch_size=config.train.batch_size * ranks,
        constraints=constraints_of(settings),
        splits=splits_of(settings, config.tables.optimizer),
    )
    if settings.placement not in (None, "round_robin"):
        given_plan(settings.placement, task)


def replicated_of(config: Config, features: Features, ranks: int, before: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the tables to replicate on every rank. PlanError names one that cannot be.

    before: those of the checkpoint being resumed, which `auto` keeps, so that resuming changes no bit."""
    asked, settings, names = config.tables.replicate, config.autoshard, {table.name for table in features.tables}
    if asked == "auto" and ranks > 1 and before and names.issuperset(before):
        return tuple(before)
    placed = {Shard(name).table for name in settings.pinned}
    placed |= {Shard(name).table for group in (*settings.together, *settings.apart) for name in group}
    if settings.placement not in (None, "round_robin"):
        placed |= {*ShardingPlan.load(Path(settings.placement)).tables}
    return replicated_tables(
        asked,
        features.tables,
        features=features.counts,
        batch_size=config.train.batch_size,
        world_size=ranks,
        exchange_bytes=exchange_bytes(config.train.exchange_dtype),
        optimizer=config.tables.optimizer.name,
        decays=config.tables.optimizer.weight_decay > 0,
        placed=placed,
        sequences=features.sequence_table_names,
    )


def check_own(source: DataSource, device: torch.device | None, *, files: bool) -> None:
    """Raises UserError if a table's own optimizer cannot run, or the file of its initial values has another shape."""
    if device is not None:
        check_optimizers((table.optimizer for table in source.tables if table.optimizer is not None), device)
    for table in source.tables if files else ():
        check_file(table)


def check_splits(config: Config, source: DataSource) -> None:
    """Raises UserError if checkpoints or early stopping need val samples and there are none."""
    selection = Selection(config.checkpoint.keep_best, config.train.early_stopping)
    if selection.wanted and source.num_samples("val") == 0:
        raise UserError(
            "checkpoint.keep_best and train.early_stopping choose by evaluations on the val split, but this data "
            "has no val samples (choosing by the test split would make its metrics too good). Name val data, or remove "
            "these keys."
        )


def check_batch_norm(model: nn.Module, samples: int, first: int, global_batch: int, world_size: int) -> None:
    """Raises UserError if an epoch's last batch gives a rank one sample, for which BatchNorm has no statistics. first:
    the sample that the current epoch resumes from."""
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return
    for start in (0, first):
        last = (samples - start) % global_batch or global_batch
        share = -(-last // world_size)
        rank = next((r for r in range(world_size) if min(last, (r + 1) * share) - r * share == 1), None)
        if rank is not None:
            raise UserError(
                f"the model has BatchNorm, but the last of {samples:,} training samples leave 1 on rank {rank} (a "
                f"batch of {last} on {world_size} rank(s)), for which it has no statistics. Change train.batch_size, "
                "or remove a sample."
            )


def check_position(position: Position, source: DataSource) -> None:
    """Raises UserError if training would resume behind the end of its data."""
    samples = source.num_samples("train")
    if position.sample > samples:
        raise UserError(
            f"the checkpoint is at sample {position.sample:,} of epoch {position.epoch} (from 0), but there are only "
            f"{samples:,} samples to train on: they have become fewer. Put the data back, or start a new run; a "
            "checkpoint of an epoch's end can be continued with fewer, too (--resume RUN/checkpoints/step_...)."
        )


def free_and_sharers(runtime: Runtime) -> tuple[int, int]:
    """Returns free bytes where batches and dense weights will be, and how many ranks share them. Collective, as a rank
    may see only its own GPU."""
    places = runtime.all_gather((host_id(), name_of(runtime.device)))
    return free_memory(runtime.device), places.count(places[runtime.rank])


def check_sizes(config: Config, source: DataSource, world_size: int, free_bytes: int, host_ranks: int = 1) -> None:
    """Raises UserError if batches or dense layers of a host's ranks need more than its free memory. Estimates are lower
    bounds: what is refused surely does not fit."""
    samples = source.num_samples("train")
    batch_size = min(config.train.batch_size, -(-samples // world_size))
    pooling = _ids_per_sample(config, source)
    each = f"on each of the {host_ranks} ranks that share its memory" if host_ranks > 1 else "on each rank"
    vectors = sum(table.embedding_dim for table in source.tables)
    widest = max(config.model.dense_arch_layer_sizes + config.model.over_arch_layer_sizes)
    per_sample = 4 * (source.num_dense + len(source.tables) + 2 * vectors + 2 * widest) + 8 * pooling
    bottom = [source.num_dense, *config.model.dense_arch_layer_sizes]
    weights = sum(a * b for sizes in (bottom, config.model.over_arch_layer_sizes) for a, b in itertools.pairwise(sizes))
    if config.model.factory is None and host_ranks * 4 * _COPIES * weights > free_bytes:
        raise UserError(
            f"the dense layers have {weights:,} weights and need at least {gib(4 * _COPIES * weights)} {each}, "
            f"but {gib(free_bytes)} are free. Make model.dense_arch_layer_sizes or over_arch_layer_sizes smaller."
        )
    if host_ranks * batch_size * per_sample > free_bytes:
        raise UserError(
            f"a batch of {batch_size:,} samples needs at least {gib(batch_size * per_sample)} {each}, but "
            f"{gib(free_bytes)} are free. Lower train.batch_size ({config.train.batch_size:,})."
        )


def _ids_per_sample(config: Config, source: DataSource) -> float:
    """Returns ids per sample as configured, or of the first samples."""
    if isinstance(config.data, SyntheticData):
        return sum(table.mean_pooling for table in config.data.tables)
    count = min(_MEASURED, source.num_samples("train"))
    return int(source.read("train", 0, 0, count).lengths_TB.sum()) / max(1, count)
