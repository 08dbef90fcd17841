"""What the loop is told after each interval of training, and what it answers: plain data.

interval = Interval(epoch, step, profile, throughput, remaining_steps)
decision = controller.after_interval(interval, plan)
decision.action, decision.text          # "kept", "kept: best candidate 1.2% faster, below min_gain 2%"
decision.to_json()                      # a line of decisions.jsonl
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.plan import Constraints, ShardingPlan, Topology
from dlrm_autoshard.planner.task import PlacementTask

Action = Literal["kept", "moved", "rolled_back", "refused"]

LEAST_SAMPLES = 3
"""Timed steps from which an interval says anything."""


@dataclass(frozen=True)
class Problem:
    """What plans must respect, and what moves weigh. bytes_of: weight and optimizer state of each table."""

    topology: Topology
    constraints: Constraints
    table_bytes: Mapping[str, int]
    bytes_of: Mapping[str, int]

    def task(self, profile: StepProfile) -> PlacementTask:
        """The tables that were measured, to be placed anew."""
        return PlacementTask.build(
            profile.tables,
            profile.stats,
            self.topology,
            batch_size=profile.batch_size,
            table_bytes=self.table_bytes,
            constraints=self.constraints,
        )

    def bytes_to_move(self, plan: ShardingPlan, new_plan: ShardingPlan) -> int:
        return sum(self.bytes_of[move.table] for move in plan.moves_to(new_plan))


@dataclass(frozen=True)
class Interval:
    """What was measured over an interval that ends after `step`; throughput over all ranks, in examples/s. samples:
    steps whose stages were timed."""

    epoch: int
    step: int
    profile: StepProfile
    throughput: float
    remaining_steps: int
    samples: int = LEAST_SAMPLES

    @property
    def step_ms(self) -> float:
        return 1000 * self.profile.batch_size / self.throughput


@dataclass(frozen=True)
class Decision:
    """One line of decisions.jsonl; `new_plan` is what the ranks are to adopt, None where they keep theirs.

    error_before, error_after: of the cost model on the interval's stages, before it had seen them and after. part_of:
    the larger move that this one is a part of, in words. decide_seconds: for which training stood still to learn and
    decide, the move itself apart."""

    epoch: int
    step: int
    action: Action
    text: str
    predicted_gain: float | None = None
    measured_gain: float | None = None
    bytes_moved: int = 0
    move_seconds: float = 0.0
    part_of: str | None = None
    paid_back_after_steps: int | None = None
    error_before: float | None = None
    error_after: float | None = None
    throughput_before: float | None = None
    throughput_after: float | None = None
    decide_seconds: float = 0.0
    new_plan: ShardingPlan | None = None

    def to_json(self) -> dict[str, Any]:
        record = {name: value for name, value in vars(self).items() if name != "new_plan"}
        return {**record, "plan": None if self.new_plan is None else self.new_plan.fingerprint}
