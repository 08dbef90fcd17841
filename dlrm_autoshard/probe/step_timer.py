"""Times lookups and backward + update, step by step.

timer = StepTimer(device, warmup=4, repeats=5, seconds=0.25)
forward_ms, backward_ms = timer.ms(module, batches, gradient)     # of each timed step
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlrm_autoshard.distributed.device import timer_of

_CYCLES_HELD = 3e9
"""GPU cycles that cover a second of launching: half as much again at its highest clock."""

# On a shared core a rank computes for a time slice, then waits for one, so a step of a few ms waits once, twice or not
# at all. In 19 starts on two cores, half of one of which was taken, medians of three steps made a rank look 1.2 to 2.7
# times as slow as the other; over all steps of a start it was 1.94 to 2.04 times. So compute and waiting are measured
# apart.


class Step(NamedTuple):
    """Seconds of a step's lookup and of its backward + update, in wall time and in this thread's CPU time."""

    lookup: float
    update: float
    lookup_cpu: float
    update_cpu: float

    @property
    def wall(self) -> float:
        return self.lookup + self.update

    @property
    def cpu(self) -> float:
        return self.lookup_cpu + self.update_cpu


class StepTimer:
    """Times steps of an embedding module.

    warmup, warmup_seconds: untimed steps first; at least one, no more than these seconds.
    repeats, seconds: at least `repeats` timed steps, up to four times as many within `seconds`.
    undisturbed: time steps again during which another process took this core (CPU only). Otherwise they count, each as
    if it had waited for its core as long as the average step so far.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        warmup: int,
        repeats: int,
        seconds: float,
        warmup_seconds: float = math.inf,
        undisturbed: bool = False,
    ) -> None:
        self._warmup, self._warmup_seconds = warmup, warmup_seconds
        self._repeats, self._seconds = repeats, seconds
        self._cuda = device.type == "cuda"
        self._timer, self._steps_a_round = timer_of(device), warmup + repeats if self._cuda else 1
        self._undisturbed = undisturbed and not self._cuda
        self._apart = not (self._cuda or undisturbed) and _ticks_finely()
        self._wall = self._cpu = 0.0

    def ms(
        self, module: Any, batches: Sequence[tuple[Tensor, Tensor]], gradient: Tensor
    ) -> tuple[list[float], list[float]]:
        """Returns ms of each timed step's lookup, and of its backward + update."""
        steps = self._timed(module, batches, gradient)
        if not self._apart or torch.get_num_threads() > 1:  # CPU time is this thread's only
            return [1e3 * step.lookup for step in steps], [1e3 * step.update for step in steps]
        self._wall += sum(step.wall for step in steps)
        self._cpu += sum(step.cpu for step in steps)
        ms = 1e3 * self.wait_factor
        return [ms * step.lookup_cpu for step in steps], [ms * step.update_cpu for step in steps]

    @property
    def wait_factor(self) -> float:
        """Returns wall time / CPU time of all steps so far: how much longer steps take by waiting for their core."""
        return max(1.0, self._wall / self._cpu) if self._cpu > 0 else 1.0

    def _timed(self, module: Any, batches: Sequence[tuple[Tensor, Tensor]], gradient: Tensor) -> list[Step]:
        timed: list[Step] = []
        started, disturbed = time.perf_counter(), 0
        for number, step in enumerate(self._steps(module, batches, gradient)):
            if number < self._warmup and (number == 0 or time.perf_counter() < started + self._warmup_seconds):
                continue
            if self._undisturbed and step.cpu < 0.97 * step.wall - 2e-5 and disturbed < 10 * self._repeats:
                disturbed += 1
                continue
            timed.append(step)
            enough = self._repeats if time.perf_counter() > started + self._seconds else 4 * self._repeats
            if len(timed) >= enough:
                break
        return timed

    def _steps(self, module: Any, batches: Sequence[tuple[Tensor, Tensor]], gradient: Tensor) -> Iterator[Step]:
        """Runs steps forever and yields their times.

        A GPU is held busy while the host launches a round of steps; otherwise short kernels would be timed as
        launches. The first lookup is not held: fbgemm reads a value back in it and would wait for the hold to end."""
        timer, turns, launching = self._timer, itertools.cycle(batches), 0.002
        if self._cuda:
            module(*next(turns)).backward(gradient)
        while True:
            if self._cuda:
                torch.cuda._sleep(int(self._steps_a_round * launching * _CYCLES_HELD))
            marks, began = [], time.perf_counter()
            for batch in itertools.islice(turns, self._steps_a_round):
                start, begun = timer.mark(), time.thread_time()
                pooled = module(*batch)
                middle, looked_up = timer.mark(), time.thread_time()
                pooled.backward(gradient)
                updated = time.thread_time()
                marks.append((start, middle, timer.mark(), looked_up - begun, updated - looked_up))
            launching = (time.perf_counter() - began) / self._steps_a_round
            for start, middle, end, *cpu in marks:
                timer.finish(end)
                yield Step(timer.seconds(start, middle), timer.seconds(middle, end), *cpu)


def _ticks_finely() -> bool:
    """Returns whether this thread's CPU clock can time a step: some sandboxes count in hundredths of a second."""
    first = time.thread_time()
    while (later := time.thread_time()) == first:
        pass
    return later - first < 1e-4
