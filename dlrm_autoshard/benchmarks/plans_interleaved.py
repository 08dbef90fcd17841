"""Compares plans within one job on pinned ranks, whose tables move from plan to plan every second or so.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

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
def busy_neighbour(wanted: bool = True) -> Iterator[Callable[[bool], None]]:
    """Yields a switch for a process that takes half of this rank's core, off at first.

    The process never rests and inherits the rank's core, so the system gives each of them half of it. wanted: False
    starts no process, and the switch does nothing.
    """
    if not wanted:
        yield lambda on: None
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        busy.send_signal(signal.SIGSTOP)
        try:
            yield lambda on: busy.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        finally:
            busy.kill()


@dataclass(frozen=True)
class Turn:
    """A plan to train under. busy: a busy process shares the last rank's core."""

    plan: ShardingPlan
    busy: bool = False


def plans_interleaved(workload: Workload, turns: Mapping[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Returns the examples/s of both ranks together, by turn and round; every other round is in the opposite order.

    Separate jobs minutes apart differ by a fifth on a shared machine, whatever their plans. These see the same machine.
    """
    steps = on_pinned_ranks(_rank, WORLD_SIZE, workload, dict(turns), rounds, True, timeout=900)[0]
    return {name: [workload.batch_size / seconds for seconds, _ in own] for name, own in steps.items()}


def busiest_cpu(
    workload: Workload, plans: Mapping[str, ShardingPlan], ranks: int, rounds: int
) -> dict[str, list[float]]:
    """Returns the busiest rank's CPU seconds of a step, by plan and round.

    There may be more ranks than cores: vectors travel over TCP, so waiting for other ranks takes no CPU time.
    """
    turns = {name: Turn(plan) for name, plan in plans.items()}
    by_rank = on_pinned_ranks(_rank, ranks, workload, turns, rounds, False, timeout=900)
    return {
        name: [max(cpu for _, cpu in own) for own in zip(*(rank[name] for rank in by_rank), strict=True)]
        for name in plans
    }


def _rank(
    rank: int, world_size: int, workload: Workload, turns: dict[str, Turn], rounds: int, shared_memory: bool
) -> dict[str, list[tuple[float, float]]]:
    """Returns this rank's mean wall-clock and CPU seconds of a step, by turn and round."""
    keep_freed_memory()
    world = dist.group.WORLD
    assert world is not None
    plan = next(iter(turns.values())).plan
    job = OurJob(workload, plan, rank, workload.batches(rank, world_size), shared_memory=shared_memory)
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    with busy_neighbour(rank == world_size - 1 and any(turn.busy for turn in turns.values())) as share_core:
        for number in range(-1, rounds):  # the first is a warm-up
            for name in list(turns) if number % 2 else reversed(turns):
                reshard(job.embeddings, turns[name].plan, group=world)
                share_core(turns[name].busy)
                job.run(STEPS_TO_SETTLE)
                began = time.process_time()
                seconds = job.run(STEPS)
                if number >= 0:
                    steps[name].append((seconds / STEPS, (time.process_time() - began) / STEPS))
    return steps


def best_of(rates: Mapping[str, Sequence[float]], names: Sequence[str]) -> tuple[list[float], list[str]]:
    """Returns the rates of the fastest of these plans, by round, and which plans these are.

    The best of several noisy figures is the luckiest, so each half of the rounds measures the plan that was fastest in
    the other half.
    """
    best, chosen = np.empty(len(rates[names[0]])), []
    for half in (0, 1):
        fastest = max(names, key=lambda name: median(rates[name][half::2] or rates[name]))
        best[1 - half :: 2] = rates[fastest][1 - half :: 2]
        chosen.append(fastest)
    return [float(rate) for rate in best], list(dict.fromkeys(chosen))


def recovered(looped: Sequence[float], static: Sequence[float], best: Sequence[float]) -> Ratio | None:
    """Returns the share of the gap between the static and the best plan that resharding closed, by median rates.

    None where the best plan is no faster than the static one.
    """

    def share(looped: np.ndarray, static: np.ndarray, best: np.ndarray) -> np.ndarray:
        here, there, most = (np.median(rates, axis=-1) for rates in (looped, static, best))
        return share_of_gap(here - there, most - there)

    if np.median(best) <= np.median(static):
        return None
    return with_interval(share, looped, static, best)


def share_of_gap(gained: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """Returns gained / gap. Without a gap it is infinite for any gain, and minus infinity for any loss."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(gained == 0, 0.0, gained / np.maximum(gap, 0.0)))
