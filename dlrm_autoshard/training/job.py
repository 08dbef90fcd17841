"""What a training job consists of on one rank, built in the order in which things depend on one another.

job = Job(config, runtime, run_dir)         # tables placed, model made, the newest checkpoint loaded: ready to train
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from threading import Lock

import psutil
import torch

from dlrm_autoshard.autoshard.initial_plan import place
from dlrm_autoshard.autoshard.intervals import Intervals
from dlrm_autoshard.autoshard.sampling import steps_of_part
from dlrm_autoshard.config import Config
from dlrm_autoshard.data.batch import Split, label_names_of
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.data.loader import Loader, reader_threads
from dlrm_autoshard.data.open import open_source, settled
from dlrm_autoshard.data.statistics import measure_stats
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.moves.reshard import reshard
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.distributed.step import TrainStep
from dlrm_autoshard.distributed.tables.optimizers import check_optimizer
from dlrm_autoshard.model.dlrm import make_model
from dlrm_autoshard.training.agreement import agree_on_dense
from dlrm_autoshard.training.checkpoints.checkpoint import Checkpoints
from dlrm_autoshard.training.checkpoints.manifest import DamagedCheckpoint
from dlrm_autoshard.training.random_state import seed_all
from dlrm_autoshard.training.selection import Selection
from dlrm_autoshard.training.start_checks import (
    check_batch_norm,
    check_position,
    check_sizes,
    check_splits,
    free_and_sharers,
)
from dlrm_autoshard.training.state import Position, TrainingState, in_trained_order, plan_of


class Job:
    """position: where training goes on. total_steps: those done (perhaps on another number of ranks) and to come.

    Of the run's files only decisions.jsonl is cut back to the checkpoint here, by what decides; a start that fails
    leaves all others as they were.
    """

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        run_dir: Path,
        checkpoint: Path | None = None,
        *,
        fall_back: bool = True,
    ) -> None:
        """checkpoint: to start from; None: the newest. fall_back: where that is damaged, to the one before it."""
        joined = time.time()
        seed_all(config.run.seed, runtime.rank)
        self.source, self._reading = open_source(config.data, config.tables), Lock()
        config = config.model_copy(update={"data": settled(config.data, self.source)})
        self.config, self.runtime, self.run_dir = config, runtime, run_dir
        check_splits(config, self.source)
        check_optimizer(config.tables.optimizer.name, runtime.device)
        check_sizes(config, self.source, runtime.world_size, *free_and_sharers(runtime))
        self.global_batch = config.train.batch_size * runtime.world_size
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
        self.notes += getattr(self.source, "remarks", [])
        given, shared = self.source, config.tables.shared
        self.source, columns = in_trained_order(given, shared, self.resumed_from)
        if self.source is not given:
            self.notes.append("The config has columns in another order than the checkpoint, whose order is kept.")
        features = Features.of(self.source.tables, shared)
        current = plan_of(self.resumed_from, features.tables)
        total, decides = self._count_steps(Position()), config.autoshard.reshard
        self.interval_steps = decides.every_steps or decides.every_epochs * self.steps_of_interval(total)
        self.placement = place(
            config.autoshard,
            runtime,
            features.tables,
            partial(
                measure_stats,
                self.source,
                self.global_batch,
                config.autoshard.stats_batches,
                features,
                on_bad_id=config.data.on_bad_id,
            ),
            batch_size=self.global_batch,
            optimizer=config.tables.optimizer,
            exchange_dtype=config.train.exchange_dtype,
            steps=total,
            interval_steps=self.interval_steps,
            seed=config.run.seed,
            current=current,
            on_host=config.tables.location == "managed_caching",
            costs_dir=Path(config.run.dir) / ".costs",
        )
        if current is not None and self.placement.plan != current and current.world_size == runtime.world_size:
            self.notes.append("The checkpoint's plan does not fit these settings any more: tables were placed anew.")
        if current is not None and current.world_size != runtime.world_size:
            self.notes.append(
                f"The checkpoint is of {current.world_size} rank(s), these are {runtime.world_size}: train.batch_size "
                f"is of a rank, so the global batch is {self.global_batch:,} now. Learning rates, and schedules by "
                "steps, are as configured."
            )
        self.embeddings = ShardedEmbeddings(
            features,
            self.placement.plan,
            config.tables,
            rank=runtime.rank,
            group=runtime.group,
            id_group=runtime.id_group,
            device=runtime.device,
            exchange_dtype=config.train.exchange_dtype,
            seed=config.run.seed,
            initial_values=self.resumed_from is None,
        )
        tables, labels = self.embeddings.output_tables, label_names_of(self.source)
        model = make_model(self.source.num_dense, tables, config.model, config.run.seed, len(labels))
        self.dense = DataParallelDense(model, config.dense_optimizer, runtime.group, runtime.device, average=False)
        agree_on_dense(self.dense, runtime)
        self.clock = StageClock(runtime.device, runtime.control if runtime.device.type == "cpu" else runtime.group)
        self.autocast = config.train.dense_dtype == "bf16"
        graphs_fit = config.model.factory is None if config.train.cuda_graphs is None else config.train.cuda_graphs
        torch.backends.cuda.matmul.allow_tf32 = config.train.tf32
        self.step = TrainStep(
            model,
            self.dense,
            self.embeddings,
            self.clock,
            overlap=config.train.overlap,
            autocast=self.autocast,
            graphs=graphs_fit,
            accumulate=config.train.accumulate,
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
        self.state = TrainingState(
            runtime,
            self.checkpoints,
            self.embeddings,
            self.dense,
            columns,
            self.intervals,
            Selection(config.checkpoint.keep_best, config.train.early_stopping),
        )
        self.position = self._resume(fall_back)
        check_position(self.position, self.source)
        samples = self.source.num_samples("train")
        check_batch_norm(model, samples, self.position.sample, self.global_batch, runtime.world_size)
        self.total_steps = self._count_steps(self.position)
        planned = 0.0 if self.placement.result is None else self.placement.result.seconds
        self.start_seconds = {
            "joining": joined - psutil.Process().create_time(),
            "planning": planned,
            "building": time.time() - joined - planned,
        }

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

    def _count_steps(self, position: Position) -> int:
        """Those done there, and to come."""
        samples, train = self.source.num_samples("train"), self.config.train
        total = position.step
        if position.epoch < train.epochs:
            this_epoch = -(-(samples - position.sample) // self.global_batch)
            total += this_epoch + (train.epochs - position.epoch - 1) * -(-samples // self.global_batch)
        return total if train.max_steps is None else min(total, train.max_steps)

    def steps_of_interval(self, total: int) -> int:
        """Where `reshard.every_steps` says nothing: an epoch's, or those of an equal part. total: of the job."""
        epoch = -(-self.source.num_samples("train") // self.global_batch)
        return epoch if self.config.autoshard.reshard.every_epochs > 1 else steps_of_part(epoch, total)

    def batches(self, split: Split, epoch: int, first_sample: int = 0) -> Loader:
        """This rank's slices of an epoch."""
        train, data = self.config.train, self.config.data
        return Loader(
            self.source,
            split,
            epoch,
            train.batch_size if split == "train" else train.eval_batch_size or train.batch_size,
            self.runtime.rank,
            self.runtime.world_size,
            first_sample=first_sample,
            prefetch_batches=data.prefetch_batches,
            threads=reader_threads(data.reader_threads, self.runtime.device, self.runtime.local_world_size),
            on_bad_id=data.on_bad_id,
            cores=self.runtime.loader_cores,
            pin=self.runtime.device.type == "cuda",
            finite=split != "train" or train.on_nan == "stop",
            reading=self._reading,
        )
