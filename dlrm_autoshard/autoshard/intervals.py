"""Takes any training loop from one decision to the next: records measurements, learns from them, decides.

intervals.begin(step); sampled = intervals.is_sampled(step)         # an interval is an epoch, or a part of one
intervals.observe(ids, samples)                                     # in sampled steps
intervals.after_step(number, step, samples, remaining_steps=900, whole=step % 500 == 0, tell=print)
"""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.asked import reshards
from dlrm_autoshard.autoshard.controller import Controller
from dlrm_autoshard.autoshard.decision import Decision, Interval, error_of_median
from dlrm_autoshard.autoshard.initial_plan import Placement
from dlrm_autoshard.autoshard.resharding import MoveTo, Resharding
from dlrm_autoshard.autoshard.table_observer import TableObserver, of_whole_tables
from dlrm_autoshard.autoshard.watch import Watch
from dlrm_autoshard.config import AutoshardConfig, ProfileConfig
from dlrm_autoshard.costs import PLANNED_STAGES, StepProfile
from dlrm_autoshard.distributed.moves.movable import ArrivedIds, PlacedTables
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.formats.json_file import FormatError, checked
from dlrm_autoshard.formats.numbers import Ranks
from dlrm_autoshard.plan import shard_tables
from dlrm_autoshard.records.decisions import DecisionLog
from dlrm_autoshard.records.facts import RankInterval, rank_file
from dlrm_autoshard.records.interval import IntervalProfile, epochs_file
from dlrm_autoshard.records.jsonl import append_jsonl
from dlrm_autoshard.records.plans import write_plan
from dlrm_autoshard.tables import StatsRecord, TableStats


class Mark(NamedTuple):
    """A place in an interval: steps of the job before it and, since the interval began, this rank's real samples in
    regular steps, their time, and what was observed of the tables."""

    step: int
    samples: int
    seconds: float
    observed: TableObserver


class Ended(NamedTuple):
    """An interval that has ended. record: the measurements, on rank 0. decision: the same on all ranks; with a new
    plan, tables have moved, and ids on their way have other owners now. noticed: how the ranks' times changed, if
    the interval was cut short and nothing is decided yet. seconds: time spent on ending it."""

    record: IntervalProfile | None
    decision: Decision | None
    noticed: str | None
    seconds: float

    @property
    def moved(self) -> bool:
        return self.decision is not None and self.decision.new_plan is not None


class IntervalsRecord(TypedDict):
    """JSON form of `Intervals.state_dict`."""

    stats: list[StatsRecord]
    world_size: NotRequired[Ranks]
    planner: NotRequired[dict[str, Any] | None]
    resharding: NotRequired[dict[str, Any] | None]
    watch: NotRequired[dict[str, Any]]


class Intervals:
    """Splits a training loop into intervals. stats: the tables' newest statistics. batch_size: over all ranks.
    resharding: None if tables stay."""

    def __init__(
        self,
        settings: AutoshardConfig,
        profile: ProfileConfig,
        runtime: Runtime,
        embeddings: PlacedTables,
        move_to: MoveTo,
        clock: StageClock,
        placement: Placement,
        run_dir: Path,
    ) -> None:
        """placement: how tables came to lie as they do in `embeddings`. clock: times the steps."""
        self._runtime, self._embeddings, self._clock = runtime, embeddings, clock
        self._placement, self._run_dir = placement, run_dir
        self.batch_size = placement.task.batch_size
        self._observer = TableObserver(embeddings)
        self._rest = False  # whether this interval began with a decision before its time
        self.stats = placement.task.stats
        self.resharding: Resharding | None = None
        if reshards(settings, runtime.world_size):
            controller = None
            if placement.planner is not None:
                optimizer = embeddings.config.optimizer.name
                bytes_of = {t.name: t.weight_bytes + t.optimizer_bytes(optimizer) for t in embeddings.tables}
                log = DecisionLog(run_dir / "decisions.jsonl")
                controller = Controller(settings, placement.planner, placement.task, bytes_of, log)
            self.resharding = Resharding(settings.reshard, runtime, embeddings, move_to, controller, run_dir)
        watching = self.resharding is not None and settings.reshard.on_change
        self._watch = Watch(profile, settings.reshard.min_gain if watching else None)
        self.begin(0)

    # -- what a training loop calls ----------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Starts, or restarts, training at this step; the first steps are warm-up."""
        self._watch.begin(step)
        self._open(step)

    def is_sampled(self, step: int) -> bool:
        """Returns whether this step's stages are timed, with barriers; such a step should have a whole batch."""
        return self._watch.is_sampled(step)

    def observe(self, ids: ArrivedIds, samples: int) -> None:
        """Records a sampled step's ids. samples: real samples over all ranks."""
        self._observer.observe(ids, samples)

    def exclude(self, seconds: float) -> None:
        """Excludes time in the interval that is not training (a checkpoint, an evaluation, output)."""
        self._paused += seconds

    def after_step(
        self, number: int, step: int, samples: int, remaining_steps: int, *, whole: bool, tell: Callable[[Ended], None]
    ) -> None:
        """Counts a training step; ends the interval if it is complete, or if the ranks' times have changed, and begins
        the next. Collective when it ends, and after sampled steps.

        number: of the epoch, or of the interval. step: steps done in all. samples: this rank's real samples of the last
        step. tell: called between two intervals with the one that ended; its time counts to neither.
        """
        self._count(step, samples)
        if early := not whole and self._watch.is_due(self._clock.samples):
            self._cut(number, tell)
        if whole or early:
            self.end(number, step, remaining_steps, early=early, tell=tell)

    def end(
        self, number: int, step: int, remaining_steps: int, *, early: bool = False, tell: Callable[[Ended], None]
    ) -> None:
        """Ends the interval, as `after_step` does, and begins the next. The loop's random numbers are unaffected."""
        started = time.perf_counter()
        with random_numbers_kept(self._embeddings.device):
            record, decision = self._close(number, step, remaining_steps, early=early)
        tell(Ended(record, decision, None, time.perf_counter() - started))
        self._open(step)

    # -- how ---------------------------------------------------------------------------------------------------------

    def _open(self, step: int, timed: int = 0, samples: int = 0, seconds: float = 0.0) -> None:
        """Begins an interval. timed, samples, seconds: of steps that already belong to it, sampled ones and others."""
        self._plan = self._embeddings.plan
        self._clock.reset(keep=timed)
        self.first_step, self._timed, self._samples = step, self._clock.samples, samples
        self._paused, self._started = 0.0, time.perf_counter() - seconds
        self._suspected = Mark(step, 0, 0.0, self._observer)

    def _count(self, step: int, samples: int) -> None:
        """Counts the last of `step` steps, with this rank's real samples in it; collective if it was sampled. Begins
        a new interval if somebody else has moved tables, as earlier measurements are of another plan."""
        if self._embeddings.plan is not self._plan and self._embeddings.plan != self._plan:
            if self._runtime.rank == 0:
                write_plan(self._run_dir, step, self._embeddings.plan)
            self._watch.decided(step, moved=True)
            self._open(step)
            return
        sampled, self._timed = self._clock.samples > self._timed, self._clock.samples
        if sampled and not self._watch.timed(step):
            self._paused += self._clock.last_step_ms / 1000  # longer than others, and more of them than usual
        else:
            self._samples += samples
        if sampled and self._watch.watches:
            started = time.perf_counter()
            by_rank = self._runtime.all_gather_numbers([*self._clock.last_ms(PLANNED_STAGES), self._clock.last_step_ms])
            self.exclude(time.perf_counter() - started)
            if self._watch.see(by_rank[:, :-1], float(by_rank[:, -1].max())):
                self._suspected = Mark(step - 1, self._samples, self._seconds, self._observer)
                # Times after a change are of no use beside lookups before it.
                self._observer = TableObserver(self._embeddings)
            elif not self._watch.unusual:
                self._dismiss()

    def _dismiss(self) -> None:
        """Takes all lookups of the interval together again."""
        if self._observer is not self._suspected.observed:
            self._suspected.observed.add(self._observer)
            self._observer = self._suspected.observed

    def _cut(self, number: int, tell: Callable[[Ended], None]) -> None:
        """Ends the interval where a change was first seen, and begins one with the steps since."""
        started, mark, timed = time.perf_counter(), self._suspected, min(self._watch.unusual, self._clock.samples)
        samples, seconds = self._samples - mark.samples, self._seconds - mark.seconds
        if mark.step > self.first_step:
            record, _ = self._measured(number, mark, 0, early=False)
            tell(Ended(record, None, self._watch.noticed, time.perf_counter() - started))
        self._open(mark.step, timed, samples, seconds)

    def _close(
        self, number: int, step: int, remaining_steps: int, *, early: bool
    ) -> tuple[IntervalProfile | None, Decision | None]:
        """Writes the measurements, decides, and moves tables. Returns None if nothing was measured or no decision is
        due."""
        self._dismiss()
        mark = Mark(step, self._samples, self._seconds, self._observer)
        record, interval = self._measured(number, mark, remaining_steps, early=early)
        if not early:
            self._watch.ended(step - self.first_step)
        if interval is not None:
            self.stats = interval.profile.stats
        if self.resharding is None or not (early or self.resharding.is_due(number)):
            return record, None
        rest, self._rest = self._rest, early
        if rest and not early and self._clock.samples < thresholds.LEAST_SAMPLES:
            return record, None  # it was decided a few steps ago
        decision = self.resharding.after_interval(interval)
        self._watch.decided(step, moved=decision is not None and decision.new_plan is not None)
        return record, decision

    @property
    def _seconds(self) -> float:
        """Returns the seconds of training in this interval so far."""
        return time.perf_counter() - self._started - self._paused

    def _measured(
        self, number: int, end: Mark, remaining_steps: int, *, early: bool
    ) -> tuple[IntervalProfile | None, Interval | None]:
        """Appends each rank's own line; rank 0 appends the gathered one and returns it, with what can be decided on
        if steps were sampled."""
        started, runtime, embeddings = time.perf_counter(), self._runtime, self._embeddings
        plan, tables = embeddings.plan, embeddings.tables
        own = [shard for shard in shard_tables(tables, plan) if plan.rank_of[shard.name] == runtime.rank]
        mine = RankInterval(
            epoch=number,
            first_step=self.first_step,
            end_step=end.step,
            rank=runtime.rank,
            host=platform.node(),
            device=str(embeddings.device),
            tables=tuple(t.name for t in own),
            table_bytes=sum(t.weight_bytes + t.optimizer_bytes(embeddings.config.optimizer.name) for t in own),
            stages=self._clock.summary(),
            step_ms=self._clock.step_ms,
            throughput=end.samples / end.seconds if end.seconds > 0 else 0.0,
            cpu_share=self._clock.cpu_share,
            peak_memory_bytes=peak_memory(embeddings.device),
        )
        append_jsonl(rank_file(self._run_dir, runtime.rank), mine.to_json())
        timed = self._clock.timed_ms(PLANNED_STAGES), self._clock.cpu_shares
        gathered = runtime.gather((mine, end.observed.summary(), timed))
        if gathered is None:
            return None, None
        ranks, seen_W, timed_W = zip(*gathered, strict=True)
        seen = of_whole_tables(seen_W)
        stats = tuple(seen.get(table.name, stat) for table, stat in zip(tables, self.stats, strict=True))
        planner, predicted = self._placement.planner, None
        if planner is not None:
            predicted = planner.predict(replace(self._placement.task, stats=self.stats), plan)
        record = IntervalProfile.gather(ranks, plan, tables, stats, self.batch_size, predicted)
        append_jsonl(epochs_file(self._run_dir), record.to_json())
        if self._clock.samples == 0 or record.throughput <= 0:
            return record, None
        dense = tuple(rank.dense_ms for rank in ranks if rank.dense_ms)
        cores = tuple(rank.cpu_share for rank in ranks if rank.cpu_share)
        alone = len(dense) == len(ranks)  # else ranks may wait in what looks like computing
        profile = StepProfile(
            plan, tables, stats, self.batch_size, tuple(rank.cost for rank in ranks), "measured",
            record.noise * error_of_median(record.samples),  # of the typical step, not of a single one
            dense_ms=dense if alone else None,
            core_shares=cores if alone and len(cores) == len(ranks) else None,
        )  # fmt: skip
        return record, Interval(
            number, end.step, profile, record.throughput, remaining_steps, record.samples,
            timed_SW4=np.array(list(zip(*(stages for stages, _ in timed_W), strict=True))),
            cores_S=tuple(min(shares) for shares in zip(*(shares for _, shares in timed_W), strict=True)),
            early=early,
            gather_seconds=time.perf_counter() - started,
        )  # fmt: skip

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns all that was learned and decided, as JSON, on rank 0."""
        planner, resharding = self._placement.planner, self.resharding
        return {
            "stats": [stats.to_json() for stats in self.stats],
            "world_size": self._runtime.world_size,
            "planner": None if planner is None else planner.state_dict(),
            "resharding": None if resharding is None else resharding.state_dict(),
            "watch": self._watch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state; FormatError names a bad key."""
        record = checked(IntervalsRecord, state, extra="ignore")
        if len(record["stats"]) != len(self._embeddings.tables):
            raise FormatError(f"'stats' is of {len(record['stats'])} tables, not of {len(self._embeddings.tables)}.")
        self.stats = tuple(TableStats.from_json(stats) for stats in record["stats"])
        same_ranks = record.get("world_size", self._runtime.world_size) == self._runtime.world_size
        planner, resharding = record.get("planner"), record.get("resharding")
        if self._placement.planner is not None and planner and same_ranks:  # else the start knows better
            self._placement.planner.load_state_dict(planner)
        if self.resharding is not None and resharding:
            self.resharding.load_state_dict(resharding)
        if "watch" in record and same_ranks:
            self._watch.load_state_dict(record["watch"])


def random_numbers_kept(device: torch.device) -> AbstractContextManager[None]:
    """Keeps the training loop's random numbers (Dropout's, say) as they would be without us."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device])


def peak_memory(device: torch.device) -> int:
    """Returns this process's peak memory in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
