"""dlrm_autoshard: a DLRM trainer that places, measures and moves its embedding tables.

    from dlrm_autoshard import Planner, TableConfig, TableStats, Topology

Names are loaded when they are first used, so that `import dlrm_autoshard` costs nothing; the planner needs torch on
the CPU, but neither torch.distributed nor fbgemm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrm_autoshard.costs import RankCost, StepProfile
    from dlrm_autoshard.plan import Constraints, PlanError, ShardingPlan, Topology
    from dlrm_autoshard.planner.planner import Planner
    from dlrm_autoshard.planner.replay import CommsSample, ShardSample
    from dlrm_autoshard.planner.result import PlanResult
    from dlrm_autoshard.probe.simulator import SimulatedCluster
    from dlrm_autoshard.tables import TableConfig, TableStats

__version__ = "0.1.0"

_HOME = {
    "CommsSample": "planner.replay",
    "Constraints": "plan",
    "PlanError": "plan",
    "PlanResult": "planner.result",
    "Planner": "planner.planner",
    "RankCost": "costs",
    "ShardSample": "planner.replay",
    "ShardingPlan": "plan",
    "SimulatedCluster": "simulator",
    "StepProfile": "costs",
    "TableConfig": "tables",
    "TableStats": "tables",
    "Topology": "plan",
}

__all__ = [
    "CommsSample",
    "Constraints",
    "PlanError",
    "PlanResult",
    "Planner",
    "RankCost",
    "ShardSample",
    "ShardingPlan",
    "SimulatedCluster",
    "StepProfile",
    "TableConfig",
    "TableStats",
    "Topology",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dlrm_autoshard' has no attribute '{name}'")
    return getattr(importlib.import_module(f"dlrm_autoshard.{_HOME[name]}"), name)
