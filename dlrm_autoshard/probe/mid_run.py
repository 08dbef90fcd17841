"""Measures half of a dominant table in a running job, before it decides. Only how the two compare is taken from it:
what they take in all, training steps tell better than a moment may.

halved = next(dominant_halves(planner, task, plan))              # and the seconds that measuring it takes
learn_half(planner, task, plan, probe.measure_shards, halved)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dlrm_autoshard.costs import COMPUTE
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.search.splits import Splitted, dear_shards, with_halves
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts
from dlrm_autoshard.probe.calibration import UNSEEN_MOMENTS, ShardTimer, is_about, sample_of
from dlrm_autoshard.probe.rank_probe import MID_RUN_BUFFER_GIB, SECONDS_PER_SHARD
from dlrm_autoshard.probe.shard_probe import ShardTime
from dlrm_autoshard.tables import TableConfig

NEW_BYTES_PER_SECOND = 4e8
"""At which memory comes that a process has not touched yet: 0.5 GiB took each of two training ranks 1.6 s."""
FIRST_SECONDS = 2 * MID_RUN_BUFFER_GIB * 2**30 / NEW_BYTES_PER_SECOND
"""At most, of weights and an optimizer's state of their shape, beside what measuring takes."""


@dataclass(frozen=True)
class Halved:
    """A shard that may be halved, one of its halves, the plan with it halved, what measuring both takes; and whether a
    half of it was measured with the data that it has now."""

    shard: str
    half: str
    plan: ShardingPlan
    seconds: float
    known: bool


def dominant_halves(
    planner: Planner, task: PlacementTask, plan: ShardingPlan, deadline: float | None = None
) -> Iterator[Halved]:
    """Yields for each stage the slowest rank's shard that by itself computes for longer than ranks do in the mean, so
    that no plan balances it whole, where it may be halved. deadline: of the searches for where halves would go."""
    now = task.split_as(plan)
    costs, rank_U = planner.costs.costs_of(now), now.placed(plan)
    live = Splitted(now, costs, rank_U, costs.step_ms(rank_U))
    computes_ms = costs.rank_ms(rank_U)[:, COMPUTE].sum(axis=1)
    even_ms = computes_ms.sum() / (now.world_size - len(now.topology.excluded))
    told_T, known = _told_T2(costs).sum(axis=1), _measured(planner, now)
    for shard in dear_shards(live):
        ms, halves = float(told_T[now.names.index(shard)]), now.halves(shard)
        if ms <= even_ms or halves is None:
            continue
        child = with_halves(live, shard, planner.costs.costs_of, deadline)
        if child is not None:
            seconds = _slowest(costs) * (_first_seconds(now.table_bytes[shard]) + 2 * _seconds(ms))
            is_known = (halves[0],) in known
            yield Halved(shard, halves[0].name, child.task.plan_from(child.rank_U), seconds, is_known)


def learn_half(
    planner: Planner, task: PlacementTask, plan: ShardingPlan, measure_shards: ShardTimer, halved: Halved
) -> bool:
    """Measures the shard and its half, and conditions predictions on how the two compare: as samples of one moment, so
    that nothing is told of what both take. False where a rank could not measure it.

    All ranks measure the same at the same time, as they would compute with the table split: a half beside another
    rank's whole would be slowed for all of its time, and the whole for half of its own.
    """
    now = task.split_as(plan)
    ranks = now.world_size
    times = _times(measure_shards, [[halved.shard]] * ranks + [[halved.half]] * ranks)
    if not times:
        return False
    wholes, halves = times[:ranks], times[ranks:]
    told_2 = _told_T2(planner.costs.costs_of(now))[now.names.index(halved.shard)]
    noise = max(UNSEEN_MOMENTS, math.hypot(_noise(wholes), _noise(halves)) / ranks**0.5) / 2**0.5
    half_2, moment = told_2 * _part_taken(wholes, halves), len(planner.costs.replay.shards)
    both = [
        sample_of(now, [name], ShardTime(float(ms_2[0]), float(ms_2[1]), noise, took[0].repeats))
        for name, ms_2, took in ((halved.shard, told_2, wholes), (halved.half, half_2, halves))
    ]
    planner.costs.observe_shards([replace(sample, moment=moment) for sample in both])
    return True


def _part_taken(wholes: Sequence[ShardTime], parts: Sequence[ShardTime]) -> np.ndarray:
    """[2] of the whole's forward and backward, in the geometric mean over ranks."""
    ms_2R2 = np.array([[(took.fwd_compute_ms, took.bwd_compute_ms) for took in of] for of in (wholes, parts)])
    part_2: np.ndarray = np.exp(np.log(ms_2R2[1] / ms_2R2[0]).mean(axis=0))
    return part_2


def _noise(times: Sequence[ShardTime]) -> float:
    """RMS noise of one rank."""
    return float(np.mean([took.noise**2 for took in times]) ** 0.5)


def _measured(planner: Planner, task: PlacementTask) -> set[tuple[TableConfig, ...]]:
    """Tables and parts that were measured alone, with about the task's statistics."""
    return {s.tables for s in planner.costs.replay.shards if len(s.tables) == 1 and is_about(s, task)}


def _told_T2(costs: TaskCosts) -> np.ndarray:
    """[T, 2] ms of each table alone on the fastest rank, as far as steps have told."""
    told_T2: np.ndarray = costs.device_ms(costs.summary_TK) * costs.factor_W2.min(axis=0)
    return told_T2


def _slowest(costs: TaskCosts) -> float:
    """How many times as long as the fastest rank the slowest takes, for which all wait where all measure."""
    return float((costs.factor_W2 / costs.factor_W2.min(axis=0)).max())


def _first_seconds(num_bytes: int) -> float:
    """For memory that holds so large a shard."""
    return min(FIRST_SECONDS, num_bytes / NEW_BYTES_PER_SECOND)


def _seconds(ms: float) -> float:
    """Seconds that measuring a shard takes on the fastest rank, warmed up."""
    return SECONDS_PER_SHARD + 4e-3 * ms


def _times(measure_shards: ShardTimer, wanted: Sequence[Sequence[str]]) -> Sequence[ShardTime]:
    """None of them where a rank has no memory for it: what is predicted has to do."""
    try:
        return measure_shards(wanted)
    except UserError:
        return []
