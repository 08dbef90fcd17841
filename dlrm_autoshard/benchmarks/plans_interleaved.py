"""Compares plans in one job on pinned ranks, whose tables move from plan to plan.

rates = plans_interleaved(W_EMB, {"static": Turn(plan), "busy": Turn(plan, busy=True)}, rounds=8)
rates["static"][0]                         # examples/s in the first round
busiest_cpu(W_EMB, {"whole": whole, "rows": ranges}, ranks=4, rounds=8)["whole"][0]     # CPU seconds of a step
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from dlrm_autoshard.benchmarks.harness import on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import Ratio, with_interval
from dlrm_autoshard.benchmarks.workloads import OurJob, Workload
from dlrm_autoshard.distributed.moves.reshard import reshard
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory
from dlrm_autoshard.plan import ShardingPlan

WORLD_SIZE, STEPS, STEPS_TO_SETTLE = 2, 14, 2


@contextlib.contextmanager
def busy_neighbour(wanted: bool = True) -> Iterator[subprocess.Popen[bytes] | None]:
    """A process that never rests, on this rank's one core, which it inherits: the system gives each of them a half."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield busy
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()


@dataclass(frozen=True)
class Turn:
    """busy: with a busy process on the last rank's core."""

    plan: ShardingPlan
    busy: bool = False

    @property
    def name(self) -> str:
        return f"{self.plan.fingerprint}{', busy' if self.busy else ''}"


def plans_interleaved(workload: Workload, turns: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Examples/s over both ranks: by turn, and round.

    Separate jobs minutes apart differ by a fifth on a shared machine, whatever their plans; turns of a second or so
    within one job see the same machine. A round has one turn of each; every other round has them in the opposite order.
    """
    steps = on_pinned_ranks(_rank, WORLD_SIZE, workload, dict(turns), rounds, True, timeout=900)[0]
    return {name: [workload.batch_size / step.seconds for step in own] for name, own in steps.items()}


def busiest_cpu(
    workload: Workload, plans: Mapping[str, ShardingPlan], ranks: int, rounds: int
) -> dict[str, list[float]]:
    """CPU seconds of a step of the busiest rank, by plan and round. Ranks may be more than cores: waiting for others
    costs no CPU, as vectors travel by TCP."""
    turns = {name: Turn(plan) for name, plan in plans.items()}
    by_rank = on_pinned_ranks(_rank, ranks, workload, turns, rounds, False, timeout=900)
    return {
        name: [max(step.cpu for step in own) for own in zip(*(r[name] for r in by_rank), strict=True)] for name in plans
    }


class _Step(NamedTuple):
    """One of a turn's steps, on average. seconds: of the wall clock; cpu: of this rank's process."""

    seconds: float
    cpu: float


def _rank(
    rank: int, world_size: int, workload: Workload, turns: dict[str, Turn], rounds: int, shared_memory: bool
) -> dict[str, list[_Step]]:
    keep_freed_memory()
    world = dist.group.WORLD
    assert world is not None
    plan = next(iter(turns.values())).plan
    job = OurJob(workload, plan, rank, workload.batches(rank, world_size), shared_memory=shared_memory)
    steps: dict[str, list[_Step]] = {name: [] for name in turns}
    with busy_neighbour(rank == world_size - 1 and any(turn.busy for turn in turns.values())) as busy:
        for number in range(-1, rounds):  # the first is a warm-up
            for name in list(turns) if number % 2 else reversed(turns):
                reshard(job.embeddings, turns[name].plan, group=world)
                if busy is not None:
                    busy.send_signal(signal.SIGCONT if turns[name].busy else signal.SIGSTOP)
                job.run(STEPS_TO_SETTLE)
                began = time.process_time()
                seconds = job.run(STEPS)
                if number >= 0:
                    steps[name].append(_Step(seconds / STEPS, (time.process_time() - began) / STEPS))
    return steps


def best_of(rates: Mapping[str, Sequence[float]], names: Sequence[str]) -> tuple[list[float], list[str]]:
    """By round, the rate of the fastest of these plans; and which. The best of several noisy figures is the luckiest,
    so each half of the rounds measures the plan that the other half chose."""
    best, chosen = np.empty(len(rates[names[0]])), []
    for half in (0, 1):
        fastest = max(names, key=lambda name: median(rates[name][half::2] or rates[name]))
        best[1 - half :: 2] = rates[fastest][1 - half :: 2]
        chosen.append(fastest)
    return [float(rate) for rate in best], list(dict.fromkeys(chosen))


def recovered(looped: Sequence[float], static: Sequence[float], best: Sequence[float]) -> Ratio | None:
    """Part of the way from the static plan to the best one that resharding went, by the medians over the rounds; 95%
    of what other draws of these rounds give. None where the best plan is no faster than the static one."""

    def share(looped: np.ndarray, static: np.ndarray, best: np.ndarray) -> np.ndarray:
        here, there, most = (np.median(rates, axis=-1) for rates in (looped, static, best))
        return share_of_gap(here - there, most - there)

    if np.median(best) <= np.median(static):
        return None
    return with_interval(share, looped, static, best)


def share_of_gap(gained: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """Part of the possible gain that was gained. Without a gap any gain is more than all of it, and any loss less."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(gained == 0, 0.0, gained / np.maximum(gap, 0.0)))
