"""Stage times come from marks that wait for nothing; steps that are not sampled make none."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from dlrm_autoshard.distributed.device import Timer
from dlrm_autoshard.distributed.stage_clock import StageClock
from tests.ranks import run_ranks


class CountingTimer(Timer):
    """Of a device that is behind its host: a mark's time is known once somebody has waited for it."""

    def __init__(self) -> None:
        self.marks = self.waits = 0
        self._passed = -1

    def mark(self) -> int:
        self.marks += 1
        return self.marks - 1

    def finish(self, mark: int) -> None:
        self.waits += 1
        self._passed = mark

    def seconds(self, start: int, end: int) -> float:
        assert max(start, end) <= self._passed, "read before anybody waited for it"
        return float(end - start)


def steps_on_a_device_double(rank: int, world_size: int) -> tuple[int, int, dict[str, float], list[str]]:
    timer = CountingTimer()
    assert dist.group.WORLD is not None
    clock = StageClock(torch.device("cpu"), dist.group.WORLD, timer)
    for sampled in (False, True, False):
        waits, marks = timer.waits, timer.marks
        with clock.step(sampled=sampled):
            with clock.stage("fwd_compute"):
                pass
            clock.barrier("fwd_comms")
            with clock.stage("fwd_comms"):
                assert timer.waits == waits  # nobody waits inside a step
        assert (timer.waits, timer.marks) == (waits + sampled, marks + 8 * sampled)
    stages = {name: time.median_ms / 1e3 for name, time in clock.summary().items()}
    return timer.waits, clock.samples, stages, [name for name, _, _ in clock.spans]


def test_only_sampled_steps_wait_and_only_at_their_end() -> None:
    for waits, samples, stages, spans in run_ranks(steps_on_a_device_double, 2):
        assert (waits, samples) == (1, 1)
        assert spans == ["fwd_compute", "fwd_comms_wait", "fwd_comms"]
        # 8 marks, 7 ticks; the lookup lasts until its rank is at the barrier
        assert stages == {"fwd_compute": 2, "fwd_comms_wait": 1, "fwd_comms": 1, "other": 3}


def a_rank_that_comes_late(rank: int, world_size: int) -> dict[str, float]:
    assert dist.group.WORLD is not None
    clock = StageClock(torch.device("cpu"), dist.group.WORLD)
    for _ in range(4):
        with clock.step(sampled=True):
            with clock.stage("fwd_compute"):
                pass
            time.sleep(0.3 * rank)
            clock.barrier("fwd_comms")
            with clock.stage("fwd_comms"):
                pass
            time.sleep(0.05)
    return {name: time.median_ms / 1e3 for name, time in clock.summary().items()}


def test_what_makes_a_rank_late_after_its_computation_is_part_of_that_not_of_other() -> None:
    punctual, late = run_ranks(a_rank_that_comes_late, 2)
    assert late["fwd_compute"] >= 0.3 and late["fwd_comms_wait"] < punctual["fwd_comms_wait"]
    assert 0.05 <= late["other"] < late["fwd_compute"] and punctual["fwd_compute"] < 0.3


def bookkeeping_of_an_unsampled_step(rank: int, world_size: int) -> float:
    assert dist.group.WORLD is not None
    clock, best = StageClock(torch.device("cpu"), dist.group.WORLD), 1.0
    for _ in range(200):
        started = time.perf_counter()
        with clock.step(sampled=False):
            for _ in range(16):
                with clock.stage("fwd_compute"):
                    pass
            clock.barrier("fwd_comms")
        best = min(best, time.perf_counter() - started)
    return best


def test_a_step_that_is_not_sampled_pays_next_to_nothing() -> None:
    """16 stages: far below the 0.17 ms that all bookkeeping of such a step took."""
    assert min(run_ranks(bookkeeping_of_an_unsampled_step, 1)) < 50e-6


def a_failing_step(rank: int, world_size: int) -> int:
    assert dist.group.WORLD is not None
    clock = StageClock(torch.device("cpu"), dist.group.WORLD)
    with pytest.raises(ValueError), clock.step(sampled=True), clock.stage("fwd_compute"):
        raise ValueError
    return clock.samples


def test_a_step_that_raises_is_not_recorded() -> None:
    assert run_ranks(a_failing_step, 1) == [0]
