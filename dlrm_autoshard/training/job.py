"""Builds the parts of a training job on one rank, in the order of their dependencies.

job = Job(config, runtime, run_dir)         # tables placed, model made, newest checkpoint loaded
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
import torch

from dlrm_autoshard.autoshard.initial_plan import Placement, place
from dlrm_autoshard.autoshard.intervals import Intervals
from dlrm_autoshard.config import Config
from dlrm_autoshard.data.batch import Batch, DataSource
from dlrm_autoshard.data.checked_read import Stretch
from dlrm_autoshard.data.id_check import IdCheck
from dlrm_autoshard.data.open import open_source, settled
from dlrm_autoshard.data.sequences import said_of_cuts
from dlrm_autoshard.data.statistics import SentOnce, measure_stats, share_of_different_ids
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.lookup.dedup import choose_dedup
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.exchange import Exchange
from dlrm_autoshard.distributed.lookup.link_speed import SLOW_FOR_IDS, mb_per_s, remark
from dlrm_autoshard.distributed.lookup.lookups import EmbeddingBags
from dlrm_autoshard.distributed.lookup.sequences import travel_once
from dlrm_autoshard.distributed.moves.reshard import reshard
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.distributed.recorded_passes import passes_over
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.distributed.step import TrainStep
from dlrm_autoshard.distributed.tables.optimizers import check_optimizers
from dlrm_autoshard.formats.progress import elapsing
from dlrm_autoshard.model.dlrm import make_model
from dlrm_autoshard.plan import Topology, round_robin
from dlrm_autoshard.plan.replicated import bytes_of_copies
from dlrm_autoshard.tables import TableStats
from dlrm_autoshard.training.agreement import agree_on_dense
from dlrm_autoshard.training.checkpoints.checkpoint import Checkpoints
from dlrm_autoshard.training.checkpoints.manifest import DamagedCheckpoint, read_manifest
from dlrm_autoshard.training.data import TrainingData
from dlrm_autoshard.training.random_state import seed_all
from dlrm_autoshard.training.selection import Selection
from dlrm_autoshard.training.start_checks import (
    check_batch_norm,
    check_own,
    check_position,
    check_sizes,
    check_splits,
    free_and_sharers,
    replicated_of,
)
from dlrm_autoshard.training.state import Position, TrainingState, plan_of


class Job:
    """A job ready to train. position: where training starts. total_steps: done (perhaps on other ranks) and to come.

    Of the run's files only decisions.jsonl is truncated to the checkpoint here; if the start fails, the others are
    unchanged.
    """

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        run_dir: Path,
        checkpoint: Path | None = None,
        *,
        fall_back: bool = True,
        source: DataSource | None = None,
    ) -> None:
        """checkpoint: to start from, default the newest. fall_back: if it is damaged, use the one before. source: the
        data, if already open."""
        joined = time.time()
        seed_all(config.run.seed, runtime.rank)
        source = source or open_source(config.data, config.tables)
        config = config.model_copy(update={"data": settled(config.data, source)})
        self.config, self.runtime, self.run_dir = config, runtime, run_dir
        check_splits(config, source)
        check_optimizers([config.tables.optimizer], runtime.device)
        check_sizes(config, source, runtime.world_size, *free_and_sharers(runtime))
        self.checkpoints = Checkpoints(
            run_dir / "checkpoints",
            runtime,
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
            timeout_seconds=config.run.collective_timeout_seconds,
        )
        self.resumed_from, self.notes = runtime.from_rank_0(
            lambda: self.checkpoints.choose(checkpoint, fall_back=fall_back)
        )
        check_own(source, runtime.device, files=self.resumed_from is None)
        self.notes += [*getattr(source, "remarks", []), *said_of_cuts(source)]
        self.data = TrainingData(source, config, runtime, self.resumed_from)
        if self.data.reordered:
            self.notes.append("The config orders columns differently than the checkpoint, whose order is kept.")
        self.replicated = runtime.from_rank_0(self._choose_replicated)
        self.rows_once = runtime.from_rank_0(self._choose_rows_once)
        self.dedup = self._choose_dedup()
        shows = runtime.rank == 0 and config.run.log_level in ("debug", "info")
        with elapsing("planning", config.autoshard.budget_seconds, quiet=not shows, stream=sys.stdout):
            self.placement = self._place()
        self.embeddings = ShardedEmbeddings(
            self.data.features,
            self.placement.plan,
            config.tables,
            rank=runtime.rank,
            group=runtime.group,
            id_group=runtime.id_group,
            device=runtime.device,
            exchange_dtype=config.train.exchange_dtype,
            seed=config.run.seed,
            initial_values=self.resumed_from is None,
            replicated=self.replicated,
            rows_once=self.rows_once,
            dedup=self.dedup,
        )
        if runtime.device.type == "cpu" and (said := remark(config.train.exchange_dtype, self.embeddings.carried)):
            self.notes.append(said)
        tables, labels, of = self.embeddings.output_tables, len(self.data.label_names), self.data.features
        model = make_model(self.data.source.num_dense, tables, config.model, config.run.seed, labels, of.by_sequence)
        clock = StageClock(runtime.device, runtime.clock_group)
        self.bags = EmbeddingBags(self.embeddings, clock, average=False, overlap=config.train.overlap)
        self.dense = DataParallelDense(
            model, config.dense_optimizer, runtime.group, runtime.device, average=False, replicas=self.bags.replicas
        )
        agree_on_dense(self.dense, runtime)
        self.clock, self.autocast = clock, config.train.dense_dtype == "bf16"
        graphs_fit = config.model.factory is None if config.train.cuda_graphs is None else config.train.cuda_graphs
        torch.backends.cuda.matmul.allow_tf32 = config.train.tf32
        self.step = TrainStep(
            model,
            self.dense,
            self.bags,
            passes=passes_over(
                model, self.bags, autocast=self.autocast, graphs=graphs_fit, accumulate=config.train.accumulate
            ),
            all_finite=runtime.all_finite if config.train.on_nan == "skip" else None,
        )
        self.intervals = Intervals(
            config.autoshard,
            config.profile,
            runtime,
            self.embeddings,
            partial(reshard, self.embeddings, group=runtime.control),
            self.clock,
            self.placement,
            run_dir,
        )
        self.selection = Selection(config.checkpoint.keep_best, config.train.early_stopping)
        self.state = TrainingState(
            runtime, self.checkpoints, self.embeddings, self.dense, self.data.columns, self.intervals, self.selection
        )
        with elapsing("reading the checkpoint", quiet=not shows or self.resumed_from is None, stream=sys.stdout):
            self.position = self._resume(fall_back)
        check_position(self.position, self.data.source)
        samples, first = self.data.samples, self.position.sample
        if first == samples:  # the epoch's remaining samples no longer exist
            self.position = Position(self.position.epoch + 1, 0, self.position.step)
        check_batch_norm(model, samples, first, self.data.global_batch, runtime.world_size)
        self.total_steps = self.data.count_steps(self.position)
        self._steps_of_part = self.data.steps_of_interval(self.total_steps)
        planned = 0.0 if self.placement.result is None else self.placement.result.seconds
        self.start_seconds = {
            "joining": joined - psutil.Process().create_time(),
            "planning": planned,
            "building": time.time() - joined - planned,
        }

    @property
    def out_of_steps(self) -> bool:
        return self.position.step >= self.total_steps

    @property
    def finished(self) -> bool:
        return self.position.epoch >= self.config.train.epochs or self.out_of_steps or self.selection.stop

    @property
    def steps_left(self) -> int:
        return 0 if self.selection.stop else self.total_steps - self.position.step

    @property
    def interval_due(self) -> bool:
        """Whether an interval ends after this step: with an epoch, with the last step, every `reshard.every_steps`, or
        within long epochs if tables may move."""
        position, every = self.position, self.config.autoshard.reshard.every_steps
        if position.sample == 0 or self.out_of_steps:
            return True
        if every is not None:
            return position.step % every == 0
        in_parts = self.intervals.resharding is not None
        return in_parts and position.sample // self.data.global_batch % self._steps_of_part == 0

    def _choose_replicated(self) -> tuple[str, ...]:
        before = [] if self.resumed_from is None else read_manifest(self.resumed_from).state.replicated
        return replicated_of(self.config, self.data.features, self.runtime.world_size, before)

    def _choose_rows_once(self) -> bool:
        """Decides by the data's first samples, so that resuming changes no bit."""
        config, data, runtime = self.config, self.data, self.runtime
        if config.tables.rows_once != "auto" or not data.features.sequences:
            return config.tables.rows_once is True
        samples, on_bad_id = config.train.batch_size, config.data.on_bad_id
        different = share_of_different_ids(data.source, samples, data.features, on_bad_id=on_bad_id)
        in_memory = runtime.local_world_size == runtime.world_size
        return travel_once(different, runtime.world_size, in_memory=in_memory)

    def _choose_dedup(self) -> Sequence[str]:
        """By exchanges of the data's first samples on these ranks; where training goes on, as the checkpoint has it.
        Collective."""
        config, runtime, features, data = self.config, self.runtime, self.data.features, self.data
        if config.tables.dedup != "auto":
            return () if config.tables.dedup == "none" else config.tables.dedup
        if (before := self.resumed_from) is not None:
            return runtime.from_rank_0(lambda: read_manifest(before).state.dedup)
        samples = min(config.train.batch_size, data.source.num_samples("train") // runtime.world_size)
        if runtime.local_world_size == runtime.world_size or runtime.device.type != "cpu" or samples == 0:
            return ()

        def first_samples() -> Batch:
            first = runtime.rank * samples
            stretch = Stretch(data.source, "train", 0, first, first + samples)
            return stretch.checked(stretch.read(), IdCheck(data.source.tables, config.data.on_bad_id))

        names = [table.name for table in features.tables if table.name not in self.replicated]
        exchange = Exchange(
            features, round_robin(names, Topology(runtime.world_size)), runtime.rank, runtime.group, runtime.id_group,
            runtime.device, config.train.exchange_dtype, replicated=frozenset(self.replicated),
            packs_ids=mb_per_s(runtime.id_group) < SLOW_FOR_IDS,
        )  # fmt: skip
        choice = choose_dedup(exchange, runtime.on_all(first_samples))
        self.notes.append(str(choice))
        return choice.tables

    def _place(self) -> Placement:
        """Returns a plan for the tables: the checkpoint's, if it still fits."""
        config, runtime, data = self.config, self.runtime, self.data
        current = plan_of(self.resumed_from, data.features.tables)
        copies = [table for table in data.features.tables if table.name in self.replicated]
        tables = [table for table in data.features.tables if table not in copies]

        dedup = self.dedup if runtime.world_size > 1 else ()
        once = SentOnce(config.train.batch_size, self.rows_once, dedup) if self.rows_once or dedup else None

        def find_stats() -> list[TableStats]:
            found = measure_stats(
                data.source,
                data.global_batch,
                config.autoshard.stats_batches,
                data.features,
                on_bad_id=config.data.on_bad_id,
                once=once,
            )
            return [stats for table, stats in zip(data.features.tables, found, strict=True) if table in tables]

        total, decides = data.count_steps(Position()), config.autoshard.reshard
        self.interval_steps = decides.every_steps or decides.every_epochs * data.steps_of_interval(total)
        placement = place(
            config.autoshard,
            runtime,
            tables,
            find_stats,
            batch_size=data.global_batch,
            optimizer=config.tables.optimizer,
            exchange_dtype=config.train.exchange_dtype,
            steps=total,
            interval_steps=self.interval_steps,
            seed=config.run.seed,
            current=current if current and {*current.tables} == {table.name for table in tables} else None,
            reserved_bytes=bytes_of_copies(copies, config.tables.optimizer.name),
            on_host=config.tables.location == "managed_caching",
            costs_dir=Path(config.run.dir) / ".costs",
        )
        if current is not None and placement.plan != current and current.world_size == runtime.world_size:
            self.notes.append("The checkpoint's plan no longer fits these settings: tables were placed again.")
        if current is not None and current.world_size != runtime.world_size:
            self.notes.append(
                f"The checkpoint is of {current.world_size} rank(s), this job has {runtime.world_size}: "
                f"train.batch_size is per rank, so the global batch is {data.global_batch:,} now. Learning rates, and "
                "schedules by steps, are as configured."
            )
        return placement

    def _resume(self, fall_back: bool) -> Position:
        while self.resumed_from is not None:
            damaged = self.resumed_from
            try:
                return self.state.resume(damaged)
            except DamagedCheckpoint as damage:
                older = partial(self.checkpoints.instead_of, damaged, damage, fall_back=fall_back)
                self.resumed_from, note = self.runtime.from_rank_0(older)
                self.notes.append(note)
        return Position()
