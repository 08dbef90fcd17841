"""Costs of plans for `fit` and `compare-planners`: measured with fbgemm in one process, or simulated.

costs = Costs("measured", exchange)
[profile] = costs.measure(task, [plan])        # a StepProfile; its `source` tells how it was obtained
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.costs.exchange_model import ExchangeModel
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.simulator import SimulatedCluster
from dlrm_autoshard.tables import TableOptimizer

CostSource = Literal["measured", "simulated"]


class Costs:
    """Measures each shard of a task once, or simulates with a seeded SimulatedCluster."""

    def __init__(self, source: CostSource, exchange: ExchangeModel, seed: int = 0) -> None:
        self.source = source
        self._exchange = exchange
        self._cluster = SimulatedCluster(seed)
        self._probes: dict[TableOptimizer, Any] = {}
        self._isolated: dict[int, Any] = {}

    def measure(self, task: PlacementTask, plans: Sequence[ShardingPlan]) -> list[StepProfile]:
        if self.source == "simulated":
            return [self._cluster.profile(task.tables, task.stats, plan, task.batch_size) for plan in plans]
        from dlrm_autoshard.probe.isolated_probe import IsolatedProbe
        from dlrm_autoshard.probe.shard_probe import ShardProbe

        optimizer, key = task.splits.optimizer, id(task)
        if optimizer not in self._probes:
            self._probes[optimizer] = ShardProbe(optimizer, undisturbed=True)
        probe = self._probes[optimizer]
        if key not in self._isolated:
            self._isolated[key] = (
                task,  # kept alive, so that its id is not reused
                IsolatedProbe(task.tables, task.stats, task.batch_size, probe, self._exchange, rounds=2),
            )
        profiles: list[StepProfile] = self._isolated[key][1].measure(plans)
        return profiles
