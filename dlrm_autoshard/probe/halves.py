"""What half of a table costs, measured in mid-run where that decides: no plan is faster than its dearest shard.

learned = learn_halves(planner, task, plan, probe.measure_shards, budget_seconds=1.0)     # ["item"]: of these
"""

from __future__ import annotations

import math

from dlrm_autoshard.costs import COMPUTE
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.splits import Splitted, dear_shards
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import ShardTimer, is_about, sample_of
from dlrm_autoshard.probe.rank_probe import SECONDS_PER_SHARD
from dlrm_autoshard.probe.shard_probe import ShardTime


def learn_halves(
    planner: Planner, task: PlacementTask, plan: ShardingPlan, measure_shards: ShardTimer, budget_seconds: float
) -> list[str]:
    """Of each stage's slowest rank, the shard that may be halved and by itself computes for longer than ranks do in the
    mean: it and a half of it are measured, once for its statistics, and predictions conditioned on that.

    Only the half's part of the whole is taken from the measurement. What the whole takes training steps have told, and
    better than a moment in which the machine may be slow.
    """
    now = task.split_as(plan)
    costs = planner.costs.costs_of(now)
    rank_U = now.placed(plan)
    even_ms = costs.rank_ms(rank_U)[:, COMPUTE].sum(axis=1).mean()
    alone_ms = dict(zip((members[0] for members in now.units.members), costs.alone_ms(), strict=True))
    known = {sample.tables for sample in planner.costs.replay.shards if is_about(sample, now)}
    wanted: list[list[str]] = []
    for name in dear_shards(Splitted(now, costs, rank_U, costs.step_ms(rank_U))):
        halves, ms = now.halves(name), alone_ms.get(now.names.index(name), 0.0)
        seconds = 2 * (SECONDS_PER_SHARD + 4e-3 * ms)  # of both, warmed up
        if halves is not None and ms > even_ms and (halves[0],) not in known and seconds <= budget_seconds:
            wanted += [[name], [halves[0].name]]
            budget_seconds -= seconds
    if not wanted:
        return []
    try:
        times = measure_shards(wanted)
    except UserError:  # a rank has no memory for it: what is predicted has to do
        return []
    halves_seen = []
    for [name], half, whole_took, half_took in zip(wanted[::2], wanted[1::2], times[::2], times[1::2], strict=True):
        told_2 = costs.device_ms(costs.summary_TK[[now.names.index(name)]])[0] * costs.factor_W2.min(axis=0)
        took = ShardTime(
            float(told_2[0]) * half_took.fwd_compute_ms / whole_took.fwd_compute_ms,
            float(told_2[1]) * half_took.bwd_compute_ms / whole_took.bwd_compute_ms,
            math.hypot(whole_took.noise, half_took.noise),
            half_took.repeats,
        )
        halves_seen.append(sample_of(now, half, took))
    planner.costs.observe_shards(halves_seen)
    return [name for [name] in wanted[::2]]
