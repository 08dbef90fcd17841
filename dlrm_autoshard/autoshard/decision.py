"""What was measured over an interval, which plan is proposed, and what is decided on it: plain data.

Proposal(plan, gain=0.148, uncertainty=0.02, tables=7, bytes=432013312)
decision.action, decision.text          # "kept", "kept: best candidate saves 1.2%, below min_gain 2%"
decision.to_json()                      # a line of decisions.jsonl: its text is made here, of the other fields
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.costs import COMPUTE, IQR_OF_NORMAL, StepProfile, balance_gain, balance_gains, step_cost_ms
from dlrm_autoshard.formats.words import count, gib
from dlrm_autoshard.plan import MoveRecord, ShardingPlan
from dlrm_autoshard.tables import Shard

Action = Literal["kept", "moved", "rolled_back", "refused"]


@dataclass(frozen=True)
class Interval:
    """What was measured over an interval that ends after `step`; throughput over all ranks, in examples/s. samples:
    steps whose stages were timed, timed_SW4: each of them, in ms. remaining_steps: that are to come. changed_steps:
    since the ranks' times changed, where they did so in mid-interval; moves_since: that were made since then;
    before_change: throughput of the interval that ended by it, up to there, where this is the next one. early: it ended
    before its time, to be decided on soon. gather_seconds: for which training stood still until all this was known."""

    epoch: int
    step: int
    profile: StepProfile
    throughput: float
    remaining_steps: int
    samples: int = thresholds.LEAST_SAMPLES
    timed_SW4: np.ndarray = field(default_factory=lambda: np.zeros((0, 1, 4)), repr=False, compare=False)
    changed_steps: int | None = None
    moves_since: int = 0
    before_change: float | None = None
    early: bool = False
    gather_seconds: float = 0.0

    @property
    def step_ms(self) -> float:
        return 1000 * self.profile.batch_size / self.throughput

    @property
    def planned_part(self) -> float:
        """Of the step: what the stages take for which plans are made."""
        return step_cost_ms(self.profile.ranks) / self.step_ms

    @property
    def lasting_steps(self) -> int:
        """For which what was measured is expected to last: to the end, if nothing has changed. Where nothing is known
        of how long changes last (a density of 1/T), one of t steps lasts for x more with probability t / (t + x)."""
        t, left = self.changed_steps, self.remaining_steps
        return left if t is None else round(t * math.log1p(left / max(1, t)))

    def balance_gain(self, slowness: Sequence[float], *, exchange: bool) -> tuple[float, float]:
        """What perfect balance would save (`costs.balance_gain`), and the standard error of that.

        Of each timed step by itself, for a moment in which the whole machine is slow says nothing of balance.
        """
        gain = balance_gain(self.profile.ranks, self.step_ms, slowness, exchange=exchange)
        if len(self.timed_SW4) < thresholds.LEAST_SAMPLES:
            return gain, 0.0
        low, high = np.quantile(balance_gains(self.timed_SW4, self.step_ms, slowness, exchange=exchange), [0.25, 0.75])
        return gain, error_of_median(len(self.timed_SW4)) * float(high - low) / IQR_OF_NORMAL


def error_of_median(count: int) -> float:
    """Of so many normal values with a standard deviation of 1; of a single one its own."""
    return min(1.0, math.sqrt(math.pi / 2 / max(1, count)))


@dataclass(frozen=True)
class Proposal:
    """A plan that tables could move to. gain: part of the step time that it is predicted to save; uncertainty: standard
    deviation of that. tables, bytes: what would travel, in so many moves (`parts`). largest: bytes of the table of
    which most would."""

    plan: ShardingPlan
    gain: float
    uncertainty: float
    tables: int
    bytes: int
    parts: int = 1
    largest: int = 0

    def weighed_with(self, gain: float, uncertainty: float) -> Proposal:
        """By another estimate of the same gain, too: each counts for as much as it is sure, errors being normal."""
        own, other = max(self.uncertainty, 1e-9) ** -2, max(uncertainty, 1e-9) ** -2
        mean = (own * self.gain + other * gain) / (own + other)
        return replace(self, gain=mean, uncertainty=(own + other) ** -0.5)


def seen_of(stages_W4: np.ndarray, step_ms: float) -> np.ndarray:
    """[1 + W], parts of the step: what perfect balance would save, and how much longer each rank computes than they do
    in the mean."""
    compute_W = stages_W4[:, COMPUTE].sum(axis=1)
    away_W = (compute_W - compute_W.mean()) / max(step_ms, 1e-9)
    return np.concatenate([[balance_gains(stages_W4, step_ms)], away_W])


@dataclass(frozen=True)
class Shift:
    """By how much a move is expected to change what is `seen_of` a step; uncertainty: of that, a part of a step."""

    by_K: tuple[float, ...]
    uncertainty: float


@dataclass(frozen=True)
class Decision:
    """One line of decisions.jsonl. Gains are parts of the step time saved: positive is faster.

    why: the reason where tables stay; of a move, what else is to be said. new_plan, old_plan: what the ranks are to
    adopt and to leave; None where they keep theirs. balance_gain: what perfect balance would save, given the ranks'
    speeds (`costs.balance_gain`). error_before, error_after: of the cost model on the interval's
    stages, before it had seen them and after. moves: what travelled, once it has. part_of: the larger move that this
    one is a part of, in words.
    decide_seconds: for which training stood still to learn and decide, the move itself apart. throughput_error: of the
    one before, a part of it, by the steps that were timed. shift: what is expected to be seen of the next steps. Both
    are in no record.
    """

    epoch: int
    step: int
    action: Action
    why: str = ""
    predicted_gain: float | None = None
    uncertainty: float | None = None
    measured_gain: float | None = None
    moves: tuple[MoveRecord, ...] = ()
    move_seconds: float = 0.0
    part_of: str | None = None
    paid_back_after_steps: int | None = None
    balance_gain: float | None = None
    error_before: float | None = None
    error_after: float | None = None
    throughput_before: float | None = None
    throughput_after: float | None = None
    throughput_error: float = 0.0
    decide_seconds: float = 0.0
    new_plan: ShardingPlan | None = None
    old_plan: ShardingPlan | None = None
    shift: Shift | None = None

    @property
    def tables_moved(self) -> int:
        """Number of tables; shards of one count once."""
        return len({Shard.parse(move["shard"]).table for move in self.moves})

    @property
    def bytes_moved(self) -> int:
        return sum(move["bytes"] for move in self.moves)

    @property
    def text(self) -> str:
        """The decision in plain words, with its numbers."""
        if self.action in ("kept", "refused"):
            return f"{self.action}: {self.why}"
        verb = "moved" if self.action == "moved" else "moved back"
        done = f"{verb} {moving(self.tables_moved, self.bytes_moved)}, {self.move_seconds:.2f} s"
        gain = "" if self.predicted_gain is None else f": {gains(self.predicted_gain, self.measured_gain)}"
        return "; ".join([done + gain, *(said for said in (self.why, self.part_of) if said)])

    def to_json(self) -> dict[str, Any]:
        left_out = ("new_plan", "old_plan", "shift", "throughput_error", "why")
        record = {name: value for name, value in vars(self).items() if name not in left_out}
        plan = None if self.new_plan is None else self.new_plan.fingerprint
        return {**record, "bytes_moved": self.bytes_moved, "text": self.text, "plan": plan}

    def state_dict(self) -> dict[str, Any]:
        """All fields, as JSON, but for what is only of the next steps."""
        state = {name: v.to_json() if isinstance(v, ShardingPlan) else v for name, v in vars(self).items()}
        return state | {"shift": None}

    @staticmethod
    def from_state_dict(state: Mapping[str, Any]) -> Decision:
        plans = {name: ShardingPlan.from_json(state[name]) for name in ("new_plan", "old_plan") if state[name]}
        moves = tuple(state.get("moves", ()))
        known = {field.name for field in fields(Decision)}
        return Decision(**{**{name: value for name, value in state.items() if name in known}, **plans, "moves": moves})


def moving(tables: int, num_bytes: int) -> str:
    """'7 tables, 412 MiB'"""
    return f"{count(tables, 'table')}, {gib(num_bytes)}"


def gains(predicted: float, measured: float | None = None) -> str:
    """'predicted gain 14.8%, measured 13.9%'"""
    text = f"predicted gain {predicted:.1%}"
    return text if measured is None else f"{text}, measured {measured:.1%}"


def percent(part: float) -> str:
    """'2%', '1.2%'"""
    return f"{100 * part:.1f}".removesuffix(".0") + "%"
