"""Where a step's time goes, marked inside the real step.

clock.step(sampled=True), clock.stage("fwd_compute")      # contexts
clock.begin("dense_fwd"), clock.end()          # a stage that ends elsewhere, at the latest where the next one starts
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
    """Times stages of sampled steps; what lies between stages is `other`, so that all add up to the step.

    A computation lasts until its rank arrives at the barrier that closes it: the others wait for all of that. On a rank
    whose core is shared most of what would be `other` is there, and balancing planned stages must see it.

    A collective's own duration includes waiting for the slowest rank; a barrier before it keeps the two apart. Marks
    wait for nothing: they are read at the sampled step's end. Other steps have no barriers and no marks.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, timer: Timer | None = None) -> None:
        """group: of all ranks, for the barriers; it carries tensors of `device`. timer: default: of the device."""
        self.sampled = False
        self._device, self._group = device, group
        self._timer = timer or timer_of(device)
        self._alone = dist.get_world_size(group) == 1
        self._token = torch.zeros(1, device=device)
        self._steps: list[dict[str, float]] = []
        self._cpu_shares: list[float] = []
        self._marks: list[tuple[str, Any, Any]] = []
        self._pauses: list[tuple[Any, Any]] = []
        self._open = contextlib.ExitStack()  # a stage that was begun
        self.spans: list[tuple[str, float, float]] = []
        """(stage, start, end) of the last sampled step, in seconds from its begin: for traces."""

    @contextlib.contextmanager
    def step(self, *, sampled: bool) -> Iterator[None]:
        """One step; one that raises is not recorded."""
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
        """Leaves time that is not the step's out of it: an evaluation, or a pause in one. Its stages are not marked."""
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
        """The stage lasts until `end`, or until another one starts."""
        if self.sampled:
            self._open.enter_context(self.stage(name))

    def end(self) -> None:
        self._open.close()

    def barrier(self, stage: str) -> None:
        """Before the collective of `stage`; the time is waiting, not communication."""
        if self.sampled and not self._alone:
            with self.stage(f"{stage}_wait"):
                if self._device.type == "cpu":
                    dist.barrier(group=self._group)
                else:  # among the queued work, so that it waits for what the other devices still compute
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
        """The last step was no usual one: a profiler, say, was on."""
        del self._steps[-1:], self._cpu_shares[-1:]

    @property
    def samples(self) -> int:
        return len(self._steps)

    def summary(self) -> dict[str, StageTime]:
        """Summarises each stage that occurred; a step without it counts as one that spent no time there."""
        stages = {stage: None for step in self._steps for stage in step}
        return {
            stage: StageTime.of(
                [step.get(stage, 0.0) for step in self._steps], [step.get(stage, 0.0) for step in self._typical]
            )
            for stage in stages
        }

    def timed_ms(self, names: Sequence[str]) -> list[list[float]]:
        """Returns these stages of each sampled step, in ms."""
        return [_ms(step, names) for step in self._steps]

    def last_ms(self, names: Sequence[str]) -> list[float]:
        """The same of the last one."""
        return _ms(self._steps[-1], names)

    @property
    def last_step_ms(self) -> float:
        """The whole of the last sampled step."""
        return 1e3 * sum(self._steps[-1].values())

    @property
    def step_ms(self) -> float:
        """Mean of the typical steps."""
        return 1e3 * statistics.fmean(sum(step.values()) for step in self._typical) if self._steps else 0.0

    @property
    def _typical(self) -> list[dict[str, float]]:
        """The middle half of the steps by their whole time."""
        ordered = sorted(self._steps, key=lambda step: sum(step.values()))
        cut = len(ordered) // 4
        return ordered[cut : len(ordered) - cut]

    @property
    def cpu_shares(self) -> list[float]:
        """Returns for each sampled step the CPU time of the process, its data thread included, over wall time of the
        stages that compute; at most 1. Less means that something else had the rank's core. [] on a GPU."""
        return [min(1.0, share) for share in self._cpu_shares] if self._device.type == "cpu" else []

    @property
    def cpu_share(self) -> float | None:
        """Their median."""
        return statistics.median(self.cpu_shares) if self.cpu_shares else None

    def reset(self, keep: int = 0) -> None:
        """keep: the last so many sampled steps stay."""
        for values in (self._steps, self._cpu_shares):
            del values[: max(0, len(values) - keep)]


def _ms(step: Mapping[str, float], names: Sequence[str]) -> list[float]:
    return [1e3 * step.get(name, 0.0) for name in names]
