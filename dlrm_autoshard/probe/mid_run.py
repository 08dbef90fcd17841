"""What a running job measures before it decides: half of a dominant table, and tables whose data have changed.
Only how shards compare is taken from it: what they take in all, training steps tell better than a moment may.

learned = learn_halves(planner, task, plan, probe.measure_shards, budget_seconds=1.0)     # ["item"]: of these
unknown = unmeasured(planner, task, plan)        # shards whose data have changed, and the seconds that they take
learn_changed(planner, task, plan, probe.measure_shards, unknown)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.costs import COMPUTE
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.search import late
from dlrm_autoshard.planner.splits import Splitted, dear_shards
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts
from dlrm_autoshard.probe.calibration import UNSEEN_MOMENTS, ShardTimer, is_about, sample_of
from dlrm_autoshard.probe.rank_probe import SECONDS_PER_SHARD
from dlrm_autoshard.probe.shard_probe import ShardTime
from dlrm_autoshard.tables import TableConfig

FIRST_SECONDS = 0.3
"""That the first shard takes beside its own time, for memory that nobody has touched yet: 0.2 to 0.7 s in jobs of two
ranks."""


def learn_halves(
    planner: Planner, task: PlacementTask, plan: ShardingPlan, measure_shards: ShardTimer, budget_seconds: float
) -> list[str]:
    """Of each stage's slowest rank, the shard that may be halved and by itself computes for longer than ranks do in the
    mean: it and a half of it are measured, once for its statistics, and predictions conditioned on the half's part."""
    now = task.split_as(plan)
    costs = planner.costs.costs_of(now)
    rank_U = now.placed(plan)
    even_ms = costs.rank_ms(rank_U)[:, COMPUTE].sum(axis=1).mean()
    alone_ms = dict(zip((members[0] for members in now.units.members), costs.alone_ms(), strict=True))
    known = _measured(planner, now)
    wanted: list[list[str]] = []
    slow = _slowest(costs)
    for name in dear_shards(Splitted(now, costs, rank_U, costs.step_ms(rank_U))):
        halves, ms = now.halves(name), alone_ms.get(now.names.index(name), 0.0)
        seconds = 2 * slow * _seconds(ms)  # of both
        if halves is not None and ms > even_ms and (halves[0],) not in known and seconds <= budget_seconds:
            wanted += [[name], [halves[0].name]]
            budget_seconds -= seconds
    times = _times(measure_shards, wanted)
    if not times:
        return []
    told_T2, halves_seen = _told_T2(costs), []
    for [name], half, whole_took, half_took in zip(wanted[::2], wanted[1::2], times[::2], times[1::2], strict=True):
        told_2 = told_T2[now.names.index(name)]
        took = ShardTime(
            float(told_2[0]) * half_took.fwd_compute_ms / whole_took.fwd_compute_ms,
            float(told_2[1]) * half_took.bwd_compute_ms / whole_took.bwd_compute_ms,
            math.hypot(whole_took.noise, half_took.noise),
            half_took.repeats,
        )
        halves_seen.append(sample_of(now, half, took))
    planner.costs.observe_shards(halves_seen)
    return [name for [name] in wanted[::2]]


@dataclass(frozen=True)
class Unmeasured:
    """Shards, the dearest first, and what measuring them takes."""

    names: Sequence[str]
    seconds: float


def unmeasured(planner: Planner, task: PlacementTask, plan: ShardingPlan) -> Unmeasured:
    """The plan's shards that were not measured with the data that they have now."""
    now = task.split_as(plan)
    costs = planner.costs.costs_of(now)
    told_T2, known = _told_T2(costs), _measured(planner, now)
    unknown = [t for t in np.argsort(-told_T2.sum(axis=1)).tolist() if (now.tables[t],) not in known]
    rounds = [_seconds(float(told_T2[t].sum())) for t in unknown[:: now.world_size]]  # of each, the dearest
    return Unmeasured([now.names[t] for t in unknown], _slowest(costs) * (FIRST_SECONDS + sum(rounds)))


def learn_changed(
    planner: Planner, task: PlacementTask, plan: ShardingPlan, measure_shards: ShardTimer, unknown: Unmeasured
) -> list[str]:
    """Measures each of them alone, as many as there are within twice the time; predictions are conditioned on how they
    compare. Returns which."""
    now = task.split_as(plan)
    deadline = time.perf_counter() + 2 * unknown.seconds
    times: list[ShardTime] = []
    while len(times) < len(unknown.names) and not late(deadline):
        seen_now = _times(measure_shards, [[name] for name in unknown.names[len(times) :][: now.world_size]])
        if not seen_now:
            return []
        times += seen_now
    if len(times) < 2:
        return []
    names = list(unknown.names[: len(times)])
    told_T2 = _told_T2(planner.costs.costs_of(now))
    took_N2 = np.array([(took.fwd_compute_ms, took.bwd_compute_ms) for took in times])
    told_N2 = told_T2[[now.names.index(name) for name in names]].sum(axis=0) / took_N2.sum(axis=0) * took_N2
    seen = []
    for name, (forward, backward), took in zip(names, told_N2.tolist(), times, strict=True):
        told = ShardTime(forward, backward, max(took.noise, UNSEEN_MOMENTS), took.repeats)
        seen.append(sample_of(now, [name], told))
    planner.costs.observe_shards(seen)
    return names


def _measured(planner: Planner, task: PlacementTask) -> set[tuple[TableConfig, ...]]:
    """Sets of tables that were measured with about the task's statistics."""
    return {sample.tables for sample in planner.costs.replay.shards if is_about(sample, task)}


def _told_T2(costs: TaskCosts) -> np.ndarray:
    """[T, 2] ms of each table alone on the fastest rank, as far as steps have told."""
    told_T2: np.ndarray = costs.device_ms(costs.summary_TK) * costs.factor_W2.min(axis=0)
    return told_T2


def _slowest(costs: TaskCosts) -> float:
    """How many times as long as the fastest rank the slowest takes, for which all wait where all measure."""
    return float((costs.factor_W2 / costs.factor_W2.min(axis=0)).max())


def _seconds(ms: float) -> float:
    """That measuring a shard takes on the fastest rank, warmed up."""
    return SECONDS_PER_SHARD + 4e-3 * ms


def _times(measure_shards: ShardTimer, wanted: Sequence[Sequence[str]]) -> Sequence[ShardTime]:
    """None of them where nothing is wanted, or a rank has no memory for it: what is predicted has to do."""
    try:
        return measure_shards(wanted) if wanted else []
    except UserError:
        return []
