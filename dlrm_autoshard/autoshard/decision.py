"""Holds what was measured over an interval, and what is decided on it: plain data.

decision.action, decision.text          # "kept", "kept: best candidate saves 1.2%, below min_gain 2%"
decision.to_json()                      # a line of decisions.jsonl: its text is made here, of the other fields
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.costs import (
    COMPUTE,
    StepProfile,
    stages_W4,
    step_cost_ms,
)
from dlrm_autoshard.formats.json_file import made
from dlrm_autoshard.formats.words import count, gib
from dlrm_autoshard.plan import MoveRecord, ShardingPlan
from dlrm_autoshard.records.decisions import moves_in_words, worth_in_words
from dlrm_autoshard.records.move_worth import TimedSteps
from dlrm_autoshard.tables import Shard, lookup_work

Action = Literal["kept", "moved", "rolled_back", "refused"]


@dataclass(frozen=True)
class Interval:
    """Measurements of an interval that ends after `step`.

    throughput: examples/s over all ranks. remaining_steps: steps to come. samples: number of sampled steps; timed_SW4:
    ms of each. cores_S: for each sampled step the smallest fraction of time in which a rank had its core; () if
    unknown. early: whether the interval began with a change in the ranks' times and was cut short. gather_seconds: time
    for which training paused to gather all this.
    """

    epoch: int
    step: int
    profile: StepProfile
    throughput: float
    remaining_steps: int
    samples: int = thresholds.LEAST_SAMPLES
    timed_SW4: np.ndarray = field(default_factory=lambda: np.zeros((0, 1, 4)), repr=False, compare=False)
    early: bool = False
    cores_S: tuple[float, ...] = ()
    gather_seconds: float = 0.0

    @property
    def step_ms(self) -> float:
        return 1000 * self.profile.batch_size / self.throughput

    @property
    def timed(self) -> TimedSteps:
        """Returns the costs of the sampled steps, or of the typical step if they were not kept one by one."""
        timed_S = self.timed_SW4.max(axis=1).sum(axis=1).tolist() or [step_cost_ms(self.profile.ranks)]
        lookups = [
            lookup_work(table.embedding_dim, stat.mean_pooling)
            for table, stat in zip(self.profile.tables, self.profile.stats, strict=True)
        ]
        work_ms = float(stages_W4(self.profile.ranks)[:, COMPUTE].sum())
        return TimedSteps(tuple(timed_S), self.step_ms, work_ms, self.cores_S, tuple(lookups))

    @property
    def planned_part(self) -> float:
        """Returns the fraction of the step in the stages that plans decide."""
        return step_cost_ms(self.profile.ranks) / self.step_ms


def error_of_median(count: int) -> float:
    """Returns the standard error of the median of `count` normal values with a standard deviation of 1."""
    return min(1.0, math.sqrt(math.pi / 2 / max(1, count)))


@dataclass(frozen=True)
class Decision:
    """One line of decisions.jsonl. Gains are fractions of the step time saved; positive is faster.

    why: why tables stay, or a remark on a move. new_plan, old_plan: plans to adopt and to leave; None if tables stay.
    balance_gain: what perfect balance would save, given the ranks' speeds (`costs.balance_gain`). error_before,
    error_after: the cost model's error on the interval's stages before and after learning from it. moves: what
    travelled, once it has. part_of: the larger move that this is a part of, in words. measured_low, measured_high: 90%
    interval of measured_gain; doubt: why the gain is not known (`move_worth.Worth`). decide_seconds: pause of training
    to learn and decide, without the move.
    """

    epoch: int
    step: int
    action: Action
    why: str = ""
    predicted_gain: float | None = None
    uncertainty: float | None = None
    measured_gain: float | None = None
    measured_low: float | None = None
    measured_high: float | None = None
    doubt: str | None = None
    moves: tuple[MoveRecord, ...] = ()
    move_seconds: float = 0.0
    part_of: str | None = None
    paid_back_after_steps: int | None = None
    balance_gain: float | None = None
    error_before: float | None = None
    error_after: float | None = None
    throughput_before: float | None = None
    decide_seconds: float = 0.0
    new_plan: ShardingPlan | None = None
    old_plan: ShardingPlan | None = None

    @property
    def tables_moved(self) -> int:
        """Number of tables; shards of one count once."""
        return len({Shard(move["shard"]).table for move in self.moves})

    @property
    def bytes_moved(self) -> int:
        return sum(move["bytes"] for move in self.moves)

    @property
    def text(self) -> str:
        """Describes the decision in words and numbers."""
        if self.action in ("kept", "refused"):
            return f"{self.action}: {self.why}"
        verb = "moved" if self.action == "moved" else "moved back"
        done = f"{verb} {moving(self.tables_moved, self.bytes_moved)}, {self.move_seconds:.2f} s"
        gain = "" if self.predicted_gain is None else f": {self.gains}"
        which = moves_in_words(vars(self))
        return "; ".join([done + gain, *(said for said in (which, self.why, self.part_of) if said)])

    @property
    def gains(self) -> str:
        """Returns 'predicted gain 14.8%, measured 13.9% (11.2 to 16.6%)', or why that is not known."""
        assert self.predicted_gain is not None
        predicted, measured = f"predicted gain {self.predicted_gain:.1%}", worth_in_words(vars(self))
        if self.doubt:
            return f"{predicted}, what it gained is not known: {self.doubt}"
        return predicted if measured is None else f"{predicted}, measured {measured}"

    def to_json(self) -> dict[str, Any]:
        left_out = ("new_plan", "old_plan", "why")
        record = {name: value for name, value in vars(self).items() if name not in left_out}
        plan = None if self.new_plan is None else self.new_plan.fingerprint
        return {**record, "bytes_moved": self.bytes_moved, "text": self.text, "plan": plan}

    def state_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON."""
        return {name: v.to_json() if isinstance(v, ShardingPlan) else v for name, v in vars(self).items()}

    @staticmethod
    def from_state_dict(state: Mapping[str, Any]) -> Decision:
        """Parses the fields; FormatError names a bad key."""
        plans: dict[str, Any] = {
            name: ShardingPlan.from_json(state[name]) for name in ("new_plan", "old_plan") if state.get(name)
        }
        rest = {
            name: value for name, value in state.items() if name not in (*plans, "shift")
        }  # "shift": of older versions
        return replace(made(Decision, rest), **plans)


def moving(tables: int, num_bytes: int) -> str:
    """Returns '7 tables, 412 MiB'."""
    return f"{count(tables, 'table')}, {gib(num_bytes)}"
