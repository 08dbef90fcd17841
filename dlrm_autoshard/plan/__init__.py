"""Plans as plain data: which rank owns which tables, and the constraints on that."""

from dlrm_autoshard.plan.constraints import Constraints, Splits, Topology, check_plan, round_robin
from dlrm_autoshard.plan.sharding_plan import (
    Move,
    MoveRecord,
    PlanCosts,
    PlanError,
    PlanRecord,
    ShardingPlan,
    bytes_per_rank,
    costs_of_plan,
    shard_tables,
    shards_by_table,
)

__all__ = [
    "Constraints",
    "Move",
    "MoveRecord",
    "PlanCosts",
    "PlanError",
    "PlanRecord",
    "ShardingPlan",
    "Splits",
    "Topology",
    "bytes_per_rank",
    "check_plan",
    "costs_of_plan",
    "round_robin",
    "shard_tables",
    "shards_by_table",
]
