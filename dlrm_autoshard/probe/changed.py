"""What tables cost that were not measured since their data changed, measured in mid-run where a move depends on it.

learned = learn_changed(planner, task, plan, probe.measure_shards, budget_seconds=0.5)     # ["item", "user"]: of these
"""

from __future__ import annotations

import numpy as np

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import UNSEEN_MOMENTS, ShardTimer, is_about, sample_of
from dlrm_autoshard.probe.rank_probe import SECONDS_PER_SHARD
from dlrm_autoshard.probe.shard_probe import ShardTime


def learn_changed(
    planner: Planner, task: PlacementTask, plan: ShardingPlan, measure_shards: ShardTimer, budget_seconds: float
) -> list[str]:
    """The dearest of the plan's shards that were not measured with the data that they have now: each alone, as many as
    there is time for. Predictions are conditioned on that.

    Only how they compare with one another is taken from the measurement. What they take together training steps have
    told, and better than a moment in which the machine may be slow.
    """
    now = task.split_as(plan)
    costs = planner.costs.costs_of(now)
    told_T2 = costs.device_ms(costs.summary_TK) * costs.factor_W2.min(axis=0)
    known = {sample.tables for sample in planner.costs.replay.shards if is_about(sample, now)}
    wanted: list[int] = []
    for table in np.argsort(-told_T2.sum(axis=1)):
        if (now.tables[table],) in known:
            continue
        budget_seconds -= (SECONDS_PER_SHARD + 4e-3 * float(told_T2[table].sum())) / now.world_size  # warmed up
        if budget_seconds < 0:
            break
        wanted.append(int(table))
    if len(wanted) < 2:
        return []
    try:
        times = measure_shards([[now.names[table]] for table in wanted])
    except UserError:  # a rank has no memory for it: what is predicted has to do
        return []
    took_N2 = np.array([(time.fwd_compute_ms, time.bwd_compute_ms) for time in times])
    told_N2 = told_T2[wanted].sum(axis=0) / took_N2.sum(axis=0) * took_N2
    seen = []
    for table, (forward, backward), time in zip(wanted, told_N2.tolist(), times, strict=True):
        took = ShardTime(forward, backward, max(time.noise, UNSEEN_MOMENTS), time.repeats)
        seen.append(sample_of(now, [now.names[table]], took))
    planner.costs.observe_shards(seen)
    return [now.names[table] for table in wanted]
