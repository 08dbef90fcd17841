"""What half of a table costs, measured in mid-run where that decides: no plan is faster than its dearest shard.

learned = learn_halves(planner, task, plan, probe.measure_shards, budget_seconds=1.0)     # ["item"]: of these
"""

from __future__ import annotations

from dlrm_autoshard.costs import COMPUTE
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.splits import Splitted, dear_shards
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import ShardTimer, is_about, sample_of
from dlrm_autoshard.probe.rank_probe import SECONDS_PER_SHARD


def learn_halves(
    planner: Planner, task: PlacementTask, plan: ShardingPlan, measure_shards: ShardTimer, budget_seconds: float
) -> list[str]:
    """Of each stage's slowest rank, the shard that may be halved and by itself computes for longer than ranks do in the
    mean: it and a half of it are measured, once for its statistics, and predictions conditioned on that."""
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
    planner.costs.observe_shards([sample_of(now, shard, time) for shard, time in zip(wanted, times, strict=True)])
    return [name for [name] in wanted[::2]]
