"""Measures where a step's time goes, by marks inside real steps.

clock.step(sampled=True), clock.stage("fwd_compute")      # contexts
clock.begin("dense_fwd"), clock.end()          # a stage that ends elsewhere, at the latest where the next starts
clock.barrier("fwd_comms")                     # in sampled steps: waits for all ranks (fwd_comms_wait)
clock.summary(), clock.step_ms                 # {"fwd_compute": StageTime(...), ...} and their sum
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from dlrm_autoshard.costs import COMPUTE_STAGES, WAITS, StageTime
from dlrm_autoshard.distributed.device import Timer, timer_of

_UNTIMED = contextlib.nullcontext()


class StageClock:
    """Times stages of sampled steps; time between stages is `other`, so that all add up to the step.

    A computation counts until its rank reaches the barrier behind it, because the others wait that long. On a shared
    core most of what would be `other` happens there, and balancing must see it.

    A collective's duration includes waiting for the slowest rank; a barrier in front separates the two. Marks do not
    wait; they are read at the end of the sampled step. Other steps have no barriers and no marks.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, timer: Timer | None = None) -> None:
        """group: all ranks, for barriers; must carry tensors of `device`. timer: default the device's."""
        self.sampled = False
        self._device, self._group = device, group
        self._timer = timer or timer_of(device)
        self._alone = dist.get_world_size(group) == 1
        self._token = torch.zeros(1, device=device)
        self._steps: list[dict[str, float]] = []
        self._cpu_shares: list[float] = []
        self._marks: list[tuple[str, Any, Any]] = []
        self._pauses: list[tuple[Any, Any]] = []
        self._open = contextlib.ExitStack()  # the stage begun last
        self.spans: list[tuple[str, float, float]] = []
        """(stage, start, end) in the last sampled step, in seconds from its begin; for traces."""

    @contextlib.contextmanager
    def step(self, *, sampled: bool) -> Iterator[None]:
        """Times a step if sampled; a step that raises is not recorded."""
        if not sampled:
            yield
            return
        self.sampled, self._marks, self._pauses, self._cpu = True, [], [], 0.0
        begin = self._timer.mark()
        try:
            yield
            self.end()
        finally:
            self.sampled = False
            self._open.pop_all()
        self._record(begin, self._timer.mark())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the block, such as an evaluation, out of the step; its stages are not marked."""
        sampled, self.sampled = self.sampled, False
        start = self._timer.mark()
        try:
            yield
        finally:
            self.sampled = sampled
            if sampled:
                self._pauses.append((start, self._timer.mark()))

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self._timed(name) if self.sampled else _UNTIMED

    def begin(self, name: str) -> None:
        """Starts a stage that lasts until `end` or the next stage."""
        if self.sampled:
            self._open.enter_context(self.stage(name))

    def end(self) -> None:
        self._open.close()

    def barrier(self, stage: str) -> None:
        """Waits for all ranks before the collective of `stage`, and counts that as waiting."""
        if self.sampled and not self._alone:
            with self.stage(f"{stage}_wait"):
                if self._device.type == "cpu":
                    dist.barrier(group=self._group)
                else:  # queued, so that it waits for what the other devices still compute
                    dist.all_reduce(self._token, group=self._group)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self.end()
        start, cpu = self._timer.mark(), time.process_time()
        yield
        self._marks.append((name, start, self._timer.mark()))
        if name in COMPUTE_STAGES:
            self._cpu += time.process_time() - cpu

    def _record(self, begin: Any, end: Any) -> None:
        timer = self._timer
        timer.finish(end)
        self.spans = [(name, timer.seconds(begin, a), timer.seconds(begin, b)) for name, a, b in self._marks]
        for at, ((name, start, _), (following, arrived, _)) in enumerate(itertools.pairwise(self.spans)):
            if name in COMPUTE_STAGES and following in WAITS:
                self.spans[at] = (name, start, arrived)
        stages: dict[str, float] = defaultdict(float)
        for name, start, stop in self.spans:
            stages[name] += stop - start
        paused = sum(timer.seconds(start, stop) for start, stop in self._pauses)
        stages["other"] = max(0.0, timer.seconds(begin, end) - paused - sum(stages.values()))
        self._steps.append(dict(stages))
        wall = sum(stages.get(name, 0.0) for name in COMPUTE_STAGES)
        self._cpu_shares.append(self._cpu / wall if wall > 0 else 1.0)

    def forget_last(self) -> None:
        """Drops the last step, which was unusual: for example profiled."""
        del self._steps[-1:], self._cpu_shares[-1:]

    @property
    def samples(self) -> int:
        return len(self._steps)

    def summary(self) -> dict[str, StageTime]:
        """Summarizes each stage that occurred; steps without it count as zero."""
        stages = {stage: None for step in self._steps for stage in step}
        return {
            stage: StageTime.of(
                [step.get(stage, 0.0) for step in self._steps], [step.get(stage, 0.0) for step in self._typical]
            )
            for stage in stages
        }

    def timed_ms(self, names: Sequence[str]) -> list[list[float]]:
        """Returns ms of these stages in each sampled step."""
        return [_ms(step, names) for step in self._steps]

    def last_ms(self, names: Sequence[str]) -> list[float]:
        """Returns ms of these stages in the last sampled step."""
        return _ms(self._steps[-1], names)

    @property
    def last_step_ms(self) -> float:
        """Milliseconds of the last sampled step."""
        return 1e3 * sum(self._steps[-1].values())

    @property
    def step_ms(self) -> float:
        """Mean ms of the typical steps."""
        return 1e3 * statistics.fmean(sum(step.values()) for step in self._typical) if self._steps else 0.0

    @property
    def _typical(self) -> list[dict[str, float]]:
        """The middle half of the steps by total time."""
        ordered = sorted(self._steps, key=lambda step: sum(step.values()))
        cut = len(ordered) // 4
        return ordered[cut : len(ordered) - cut]

    @property
    def cpu_shares(self) -> list[float]:
        """CPU time of the process, including its data thread, over wall time of compute stages, per sampled step; at
        most 1. Below 1 other work had the rank's core. [] on a GPU."""
        return [min(1.0, share) for share in self._cpu_shares] if self._device.type == "cpu" else []

    @property
    def cpu_share(self) -> float | None:
        """Median of `cpu_shares`."""
        return statistics.median(self.cpu_shares) if self.cpu_shares else None

    def reset(self, keep: int = 0) -> None:
        """Drops the sampled steps but the last `keep`."""
        for values in (self._steps, self._cpu_shares):
            del values[: max(0, len(values) - keep)]


def _ms(step: Mapping[str, float], names: Sequence[str]) -> list[float]:
    return [1e3 * step.get(name, 0.0) for name in names]
