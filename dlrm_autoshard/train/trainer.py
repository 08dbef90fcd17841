"""Training: everything put together, and the epoch loop. The one place where planner and ranks meet.

    torchrun --nproc_per_node=2 launch/train.py --config configs/debug_cpu.yaml

Reading order: `train` -> `Trainer.run` -> `_train_epoch` -> distributed/step.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dlrm_autoshard.autoshard.decision import Interval
from dlrm_autoshard.autoshard.initial_plan import Placement, from_rank_0, place
from dlrm_autoshard.autoshard.resharding import Resharding
from dlrm_autoshard.config import Config
from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.data.batch import Split
from dlrm_autoshard.data.loader import Loader
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.distributed.dense import DataParallelDense, finite_on_all_ranks
from dlrm_autoshard.distributed.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.runtime import Runtime
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.distributed.step import NotFinite, TrainStep
from dlrm_autoshard.distributed.tracing import traced
from dlrm_autoshard.model.dlrm import make_model
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.records.epoch import EpochProfile
from dlrm_autoshard.records.jsonl import drop_after_step
from dlrm_autoshard.train.checkpoint import Checkpoints
from dlrm_autoshard.train.display import Display, describe
from dlrm_autoshard.train.evaluation import evaluate
from dlrm_autoshard.train.journal import Journal
from dlrm_autoshard.train.loss_watch import LossWatch
from dlrm_autoshard.train.lr_schedule import lr_scale
from dlrm_autoshard.train.opening import open_run
from dlrm_autoshard.train.recorder import Recorder
from dlrm_autoshard.train.run_directory import claimed_run_dir, job_of_this_process, record_start
from dlrm_autoshard.train.state import Position, TrainingState, plan_of
from dlrm_autoshard.train.stop_signals import Stopped, StopSignals


@dataclass(frozen=True)
class TrainResult:
    """metrics: of the last evaluation, rank 0 only. throughput: examples/s over all ranks, of the last epoch."""

    run_dir: Path
    steps: int
    metrics: Mapping[str, float]
    throughput: float


def train(config: Config, resume: str | None = None) -> TrainResult:
    """Runs a job on this rank, from its config to its last evaluation.

    resume: None starts a new run; "" continues the newest run of the config's name; else the run directory to continue.
    A job that is started again continues by itself. SIGINT and SIGTERM end it with a checkpoint, and raise `Stopped`.
    """
    with StopSignals() as signals:
        try:
            with Runtime.start(config.run) as runtime, ExitStack() as held:
                signals.agree_through(runtime.store)
                job = frozenset(filter(None, runtime.all_gather(job_of_this_process())))
                claim = claimed_run_dir(config, resume, job)
                run_dir = from_rank_0(runtime, lambda: held.enter_context(claim))
                trainer = Trainer(config, runtime, run_dir, signals)
                from_rank_0(runtime, lambda: record_start(run_dir, config, runtime.world_size))
                return trainer.run()
        except RuntimeError as error:
            if signals.received is None:
                raise
            raise Stopped(signals.received) from error  # another rank was stopped first, in mid-exchange


class Trainer:
    """One rank's part of a job. Built in the order in which things depend on one another."""

    def __init__(self, config: Config, runtime: Runtime, run_dir: Path, signals: StopSignals | None = None) -> None:
        """signals: those that end the job between two steps."""
        self.config, self.runtime, self.run_dir = config, runtime, run_dir
        self.signals = signals or StopSignals()
        self.source = open_source(config.data, config.tables)
        self.global_batch = config.train.batch_size * runtime.world_size
        self.position = Position()
        self.checkpoints = Checkpoints(
            run_dir / "checkpoints", runtime, keep=config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous
        )
        checkpoint = self.checkpoints.latest()
        self.placement: Placement = place(config, runtime, self.source, current=plan_of(checkpoint, self.source.tables))
        self.embeddings = ShardedEmbeddings(
            self.source.tables,
            self.placement.plan,
            config.tables,
            rank=runtime.rank,
            group=runtime.group,
            id_group=runtime.id_group,
            device=runtime.device,
            exchange_dtype=config.train.exchange_dtype,
            seed=config.run.seed,
        )
        model = make_model(self.source.num_dense, self.embeddings.output_tables, config.model, config.run.seed)
        self.dense = DataParallelDense(model, config.dense_optimizer, runtime.group, runtime.device)
        self.clock = StageClock(runtime.device, runtime.control if runtime.device.type == "cpu" else runtime.group)
        self.autocast = config.train.dense_dtype == "bf16"
        self.step = TrainStep(
            model,
            self.dense,
            self.embeddings,
            self.clock,
            overlap=config.train.overlap,
            autocast=self.autocast,
            all_finite=partial(finite_on_all_ranks, group=runtime.group) if config.train.on_nan == "skip" else None,
        )
        self.resharding = None
        if Resharding.is_wanted(config, runtime.world_size):
            self.resharding = Resharding(config, runtime, self.embeddings, self.placement, run_dir)
        self.state = TrainingState(
            runtime,
            self.checkpoints,
            self.embeddings,
            self.dense,
            self.placement.planner,
            self.resharding,
            self.placement.stats,
        )
        if checkpoint is not None:
            self.position = self.state.resume(checkpoint)
        forget_after(run_dir, runtime, self.position.step if checkpoint is not None else -1)
        self.recorder = Recorder(run_dir, runtime, self.embeddings, self.clock)
        self.journal = Journal(run_dir, active=runtime.rank == 0)
        self.resumed_from = checkpoint
        self.watch = LossWatch(runtime, self.step, self.state)

    # -- the training loop -----------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        try:
            return self._run()
        except Stopped as stopped:
            newest = self.checkpoints.newest()
            saved = f"--resume continues from {newest}." if newest else "There is no checkpoint of it."
            raise Stopped(stopped.number, f"after step {self.position.step}. {saved}") from None

    def _run(self) -> TrainResult:
        config, position = self.config, self.position
        metrics: Mapping[str, float] = {}
        throughput = 0.0
        between: Split = "val" if self.source.num_samples("val") else "test"
        self.total_steps = self._count_steps()
        with Display(self.runtime.rank == 0, self.total_steps, position.step) as self.display:
            if self.runtime.rank == 0:
                steps = f"{self.total_steps} steps of {self.global_batch} examples"
                open_run(
                    self.display, self.run_dir, self.placement, self.source.tables, self.state.stats,
                    step=position.step, steps=steps,
                )  # fmt: skip
            if config.checkpoint.enabled and self.resumed_from is None:
                self.state.save(position)  # so that there is always a good one to name and to go back to
            if position.step and position.sample == 0 and position.step < self.total_steps:
                metrics = self._evaluate(between)  # its checkpoint comes first, so a kill may have come between
            while position.epoch < config.train.epochs and position.step < self.total_steps:
                with self.signals.postponed():
                    record = self._train_epoch()
                    self._end_if_asked()
                throughput = record.throughput if record is not None else 0.0
                if position.step < self.total_steps:
                    metrics = self._evaluate(between)
            metrics = self._evaluate("test") or metrics
            self.checkpoints.finish()
            if self.resharding is not None:
                self.resharding.finish()
            report = self.journal.finish()
            if report is not None:
                self.display.line(report)
        return TrainResult(self.run_dir, position.step, metrics, throughput)

    def _count_steps(self) -> int:
        """Steps in all: those done (perhaps on another number of ranks) and those to come."""
        samples, position, train = self.source.num_samples("train"), self.position, self.config.train
        total = position.step
        if position.epoch < train.epochs:
            this_epoch = -(-(samples - position.sample) // self.global_batch)
            total += this_epoch + (train.epochs - position.epoch - 1) * -(-samples // self.global_batch)
        return total if train.max_steps is None else min(total, train.max_steps)

    def _train_epoch(self) -> EpochProfile | None:
        """From the current position to the epoch's end. Returns the epoch's record on rank 0."""
        config, position = self.config, self.position
        record, save = None, False
        with self._loader("train", position.epoch, position.sample) as loader:
            self.step.begin_epoch(iter(loader))
            self.recorder.open(position.step)
            first = position.step
            while not self.step.exhausted and position.step < self.total_steps and not self.signals.due(position.step):
                self._train_step(sampled=self._is_sampled(position.step - first))
                every = config.checkpoint.every_steps
                save = every is not None and position.step % every == 0
                if save and not self.step.exhausted and position.step < self.total_steps:
                    self._pause(lambda: self.state.save(position))
                interval = config.autoshard.reshard.every_steps
                if interval and position.step % interval == 0 and not self.step.exhausted:
                    record = self._close_interval()
        epoch_over = self.step.exhausted
        last = position.step >= self.total_steps
        stopped = not epoch_over and not last
        if position.step > self.recorder.first_step and not stopped:
            record = self._close_interval()
        if epoch_over:
            position.epoch, position.sample = position.epoch + 1, 0
        last |= position.epoch == config.train.epochs
        due = position.epoch % config.checkpoint.every_epochs == 0
        if config.checkpoint.enabled and (last or stopped or save or due):
            self.state.save(position)
        return record

    def _end_if_asked(self) -> None:
        """After a signal that any rank was sent."""
        received = [number for number in self.runtime.all_gather(self.signals.received) if number is not None]
        if received:
            self.checkpoints.finish()
            raise Stopped(received[0])

    def _train_step(self, *, sampled: bool) -> None:
        config, position = self.config, self.position
        scale = lr_scale(position.step, config.schedule)
        tracing = position.step in config.profile.trace_steps
        trace = self.run_dir / "traces" / f"step_{position.step:08d}_rank_{self.runtime.rank:05d}.json"
        ids, left_out = self.step.ids, False
        try:
            with traced(trace, self.clock) if tracing else nullcontext():
                batch = self.step.run(scale, config.tables.optimizer.lr * scale, sampled=sampled or tracing)
        except NotFinite as found:
            batch, left_out = found.batch, True
        if tracing:
            self.clock.forget_last()  # the profiler's own time is in it
        position.sample += batch.global_size
        position.step += 1
        self.recorder.count(batch.size)
        if left_out:
            self._log_metrics("train", {"skipped_not_finite": 1.0})
            self.watch.left_out(position.step)
            return self.display.step()
        self.watch.updated()
        if sampled and ids is not None:
            self.recorder.observer.observe(ids, self.runtime.world_size, batch.global_size)
        self._after_update(config.train.log_every_steps)

    def _after_update(self, log_every: int) -> None:
        logging = self.position.step % log_every == 0
        if not logging and self.runtime.device.type != "cpu":
            return self.display.step()  # looking at the loss would make the GPU's queue run dry
        loss = self.watch.look(self.position.step)
        if logging:
            self._log_metrics("train", {"logloss": loss})
        self.display.step(loss)

    def _is_sampled(self, step_in_epoch: int) -> bool:
        profile = self.config.profile
        due = step_in_epoch - profile.warmup_steps
        # The last batch of an epoch may be a smaller one, whose times say nothing about the others.
        whole = self.position.sample + self.global_batch <= self.source.num_samples("train")
        return profile.enabled and due >= 0 and due % profile.every_steps == 0 and whole

    def _close_interval(self) -> EpochProfile | None:
        """Writes what was measured, then decides on moves."""
        planner, stats = self.placement.planner, self.state.stats
        predicted = None
        if planner is not None:
            topology = self.placement.topology
            task = PlacementTask.build(self.source.tables, stats, topology, batch_size=self.global_batch)
            predicted = planner.predict(task, self.embeddings.plan)
        closed = self.recorder.close(self.position.epoch, self.position.step, self.global_batch, stats, predicted)
        record, profile = closed if closed is not None else (None, None)
        if record is not None:
            self.state.stats = profile.stats if profile is not None else stats
            self.journal.profile(record)
            measured = {"throughput": record.throughput, "step_ms": record.step_ms}
            self._log_metrics("train", measured)
            self.display.line(
                f"epoch {self.position.epoch}  step {self.position.step}  "
                f"{record.throughput:,.0f} examples/s  loss {float(self.dense.global_loss):.4f}"
            )
        self._after_interval(record, profile)
        self.recorder.open(self.position.step)
        return record

    def _after_interval(self, record: EpochProfile | None, profile: StepProfile | None) -> None:
        """Decides on moves, on every rank between intervals; record and profile are rank 0's."""
        every, position = self.config.autoshard.reshard, self.position
        due = every.every_steps is not None or (position.epoch + 1) % every.every_epochs == 0
        if self.resharding is None or not due:
            return
        interval = None
        if record is not None and profile is not None and record.throughput > 0:
            left = self.total_steps - position.step
            interval = Interval(position.epoch, position.step, profile, record.throughput, left, record.samples)
        decision = self.resharding.after_interval(interval)
        if decision is not None:
            self.display.line(f"step {position.step}  {decision.text}")
            if decision.new_plan is not None:
                self.step.redistribute()

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _evaluate(self, split: Split) -> Mapping[str, float]:
        """Metrics over all ranks' samples, on rank 0; {} elsewhere and where the split is empty."""
        if self.source.num_samples(split) == 0:
            return {}
        done = self.position.epoch - (self.position.sample == 0 and self.position.epoch > 0)
        with self._loader(split, done, 0) as loader:
            metrics = evaluate(self.step.model, self.embeddings, loader, self.runtime, autocast=self.autocast)
        if not metrics:
            return {}
        self._log_metrics(split, metrics, epoch=done)
        self.display.line(f"epoch {done}  {split}  {describe(metrics)}")
        return metrics

    def _loader(self, split: Split, epoch: int, first_sample: int) -> Loader:
        train = self.config.train
        return Loader(
            self.source,
            split,
            epoch,
            train.batch_size if split == "train" else train.eval_batch_size or train.batch_size,
            self.runtime.rank,
            self.runtime.world_size,
            first_sample=first_sample,
            prefetch_batches=self.config.data.prefetch_batches,
            on_bad_id=self.config.data.on_bad_id,
        )

    # -- small things ------------------------------------------------------------------------------------------------

    def _log_metrics(self, split: str, metrics: Mapping[str, float], epoch: int | None = None) -> None:
        self.journal.metrics(self.position.step, self.position.epoch if epoch is None else epoch, split, metrics)

    def _pause(self, action: Any) -> None:
        started = time.perf_counter()
        action()
        self.recorder.exclude(time.perf_counter() - started)


def forget_after(run_dir: Path, runtime: Runtime, step: int) -> None:
    """Drops the records of steps that will be done again (-1: all; the job was started again without a checkpoint).
    Rank 0 does so for all ranks, for there may be fewer now."""
    if runtime.rank == 0:
        for name in ("costs/*.jsonl", "metrics.jsonl", "decisions.jsonl"):
            for path in run_dir.glob(name):
                drop_after_step(path, step)
    runtime.barrier()
