"""Where a step's time goes, marked inside the real step.

    clock.begin(sampled=True)
    ...lookup...           ; clock.stop("fwd_compute")
    clock.meet("fwd_comms")                            # in sampled steps: waits for all ranks (fwd_comms_wait)
    ...all-to-all...       ; clock.stop("fwd_comms")
    clock.end()
    times = clock.summary()                            # {"fwd_compute": StageTime(...), ...}
    clock.step_ms                                      # the sum of their mean_ms

Each `stop` charges the time since the previous mark, so the stages add up to the step. A collective's own duration
includes waiting for the slowest rank; meeting before it, in sampled steps only, keeps the two apart. Steps that are
not sampled pay one `if` a mark: no barrier, no synchronisation.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dlrm_autoshard.costs import COMPUTE_STAGES, StageTime


class StageClock:
    """Marks stages of sampled steps; `control` is a gloo group over the same ranks, used to meet."""

    def __init__(self, device: torch.device, control: dist.ProcessGroup) -> None:
        self.sampled = False
        self._device, self._control = device, control
        self._alone = dist.get_world_size(control) == 1
        self._steps: list[dict[str, float]] = []
        self._cpu_shares: list[float] = []
        self._current: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        """(stage, start, end) of the last sampled step, in seconds from its begin: for traces."""

    def begin(self, *, sampled: bool) -> None:
        self.sampled = sampled
        if sampled:
            self.spans = []
            self._current = defaultdict(float)
            self._cpu, self._wall = 0.0, 0.0
            self._started = self._last = self._now()
            self._last_cpu = time.process_time()

    def stop(self, stage: str) -> None:
        """Charges the time since the last mark to `stage`."""
        if not self.sampled:
            return
        now, cpu = self._now(), time.process_time()
        self._current[stage] += now - self._last
        self.spans.append((stage, self._last - self._started, now - self._started))
        if stage in COMPUTE_STAGES:
            self._cpu += cpu - self._last_cpu
            self._wall += now - self._last
        self._last, self._last_cpu = now, cpu

    def meet(self, stage: str) -> None:
        """Waits for all ranks before the collective of `stage`; the time is waiting, not communication."""
        if self.sampled and not self._alone:
            self.stop("other")
            dist.barrier(group=self._control)
            self.stop(f"{stage}_wait")

    def end(self) -> None:
        if not self.sampled:
            return
        self.stop("other")
        self._steps.append(dict(self._current))
        self._cpu_shares.append(self._cpu / self._wall if self._wall > 0 else 1.0)
        self.sampled = False

    def forget_last(self) -> None:
        """The last step was no usual one: a profiler, say, looked on."""
        del self._steps[-1:], self._cpu_shares[-1:]

    @property
    def samples(self) -> int:
        return len(self._steps)

    def summary(self) -> dict[str, StageTime]:
        """Of each stage that occurred; a step without it counts as one that spent no time there."""
        stages = {stage: None for step in self._steps for stage in step}
        return {
            stage: stage_time(
                [step.get(stage, 0.0) for step in self._steps], [step.get(stage, 0.0) for step in self._typical]
            )
            for stage in stages
        }

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
    def cpu_share(self) -> float | None:
        """CPU time of the process, its data thread included, over wall time of the stages that compute; at most 1.
        Less means that something else had the rank's core. None on a GPU."""
        if self._device.type != "cpu" or not self._cpu_shares:
            return None
        return min(1.0, statistics.median(self._cpu_shares))

    def reset(self) -> None:
        self._steps.clear()
        self._cpu_shares.clear()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def stage_time(seconds: Sequence[float], typical: Sequence[float] = ()) -> StageTime:
    """Median, p95 and interquartile range of repeated measurements, and the mean of the typical ones, in ms."""
    ordered = sorted(1e3 * value for value in seconds)
    quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return StageTime(
        statistics.median(ordered),
        p95,
        quartiles[2] - quartiles[0],
        len(ordered),
        1e3 * statistics.fmean(typical) if typical else None,
    )
