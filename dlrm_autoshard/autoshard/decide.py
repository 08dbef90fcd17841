"""Whether tables should move, and to which plan: pure, of what the plans may save and what is remembered.

choice = decide(history, options, MoveCost(), Horizon(step_ms=20.0, steps=4000, remaining=4000, min_gain=0.01))
choice.option, choice.best, choice.why        # None: stay, and why; going back to a plan is an option like others

Knows no clock, no planner and no ranks. A gain is a part of the step time: 0.15 saves 15% of every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.formats.words import gib
from dlrm_autoshard.plan import ShardingPlan

Price = Annotated[float, Field(gt=0, le=1e18)]


@dataclass(frozen=True)
class MoveCost:
    """What moving takes: a fixed time (agreement, new lookups, caches to warm) and a price for each byte."""

    bytes_per_second: Price = thresholds.MOVE_BYTES_PER_SECOND
    fixed_seconds: Price = thresholds.MOVE_SECONDS

    def seconds(self, num_bytes: int, parts: int = 1) -> float:
        return parts * self.fixed_seconds + num_bytes / self.bytes_per_second

    def learned(self, num_bytes: int, seconds: float) -> MoveCost:
        """After a move that took so long. A small one tells the fixed part, a large one the bandwidth; half of the time
        at least is taken to be what it tells of."""
        in_transit = num_bytes / self.bytes_per_second
        if in_transit < self.fixed_seconds:
            return MoveCost(self.bytes_per_second, max(seconds - in_transit, seconds / 2))
        return MoveCost(num_bytes / max(seconds - self.fixed_seconds, seconds / 2), self.fixed_seconds)


@dataclass(frozen=True)
class Option:
    """A plan that tables could move to. saved_D: parts of the step that it may save, in draws of what is not known.
    tables, bytes: what would travel, in so many moves (`parts`)."""

    plan: ShardingPlan
    saved_D: np.ndarray
    tables: int
    bytes: int
    parts: int = 1

    @property
    def gain(self) -> float:
        return float(self.saved_D.mean())

    @property
    def uncertainty(self) -> float:
        """Standard deviation."""
        return float(self.saved_D.std())

    @property
    def surely(self) -> float:
        """What it saves with a probability of `SURE`."""
        return float(np.quantile(self.saved_D, 1 - thresholds.SURE))


class Horizon(NamedTuple):
    """steps: for which what was measured is expected to last; remaining: that are to come in the job."""

    step_ms: float
    steps: int
    remaining: int
    min_gain: float


@dataclass
class History:
    """What earlier looks and moves mean to the next, counted in intervals."""

    intervals: int = 0
    moves_at: list[int] = field(default_factory=list)
    left_at: dict[str, int] = field(default_factory=dict)  # plan fingerprint -> when it stopped being the live one
    refused_at: dict[str, int] = field(default_factory=dict)  # plan fingerprint -> when a rank could not take it
    look_seconds: float = 0.0  # what the last look took
    out_of_reach: float = 0.0  # part of the step that balance would save, and for which that look found no plan
    unjudged: bool = False  # tables have moved, and no whole interval has been looked at since

    def worth_looking(self, balance: float, when: Horizon) -> bool:
        """Whether a look may be expected to gain more than it takes. balance: part of the step that perfect balance
        would save. What is new of that is at stake: of the rest the last look has found that no plan saves it. The
        first of several noisy intervals to exceed all before it is ever rarer, so that looks are too."""
        at_stake = balance - self.out_of_reach
        seconds = at_stake * when.step_ms / 1000 * when.steps
        return at_stake >= when.min_gain and self.look_seconds <= thresholds.LOOK_SHARE * seconds

    def looked(self, seconds: float, balance: float, best_gain: float, *, whole: bool = True) -> None:
        """best_gain: of the plan that saves most, or of the one that tables move to."""
        self.look_seconds, self.out_of_reach = seconds, balance - max(0.0, best_gain)
        self.unjudged &= not whole

    def moved(self, old_plan: ShardingPlan) -> None:
        self.moves_at = [*self.moves_at, self.intervals][-thresholds.MEMORY :]
        self.left_at[old_plan.fingerprint] = self.intervals

    def refused_lately(self, plan: ShardingPlan) -> bool:
        """Later there may be memory for it."""
        return self._lately(self.refused_at.get(plan.fingerprint))

    def must_surely_save(self, plan: ShardingPlan, min_gain: float, moves_since: int) -> float:
        """More than nothing where tables have moved lately, or left this plan, so that noise moves them not to and fro.
        moves_since: the last ones, that were made for the change that is decided on now."""
        earlier = self.moves_at[: max(0, len(self.moves_at) - moves_since)]
        lately = self._lately(earlier[-1] if earlier else None) or self._lately(self.left_at.get(plan.fingerprint))
        return min_gain if lately else 0.0

    def _lately(self, at: int | None) -> bool:
        return at is not None and self.intervals - at <= thresholds.MEMORY


class Choice(NamedTuple):
    """option: what to move to; None: stay, because `why`. best: of all options, whatever it saves."""

    option: Option | None
    best: Option
    why: str = ""


def decide(
    history: History, options: Sequence[Option], cost: MoveCost, horizon: Horizon, moves_since: int = 0
) -> Choice:
    """The option that saves most seconds over the horizon, of those whose mean gain is `min_gain` at least, that surely
    gain, and that save more than moving takes."""
    ordered = sorted(options, key=lambda one: _net_seconds(one, cost, horizon), reverse=True)
    reasons = [_reason_to_stay(one, history, cost, horizon, moves_since) for one in ordered]
    for option, why in zip(ordered, reasons, strict=True):
        if not why:
            return Choice(option, option)
    return Choice(None, ordered[0], reasons[0])


def _net_seconds(option: Option, cost: MoveCost, horizon: Horizon) -> float:
    return option.gain * horizon.step_ms / 1000 * horizon.steps - cost.seconds(option.bytes, option.parts)


def _reason_to_stay(option: Option, history: History, cost: MoveCost, horizon: Horizon, moves_since: int) -> str:
    gain, margin = option.gain, option.gain - option.surely
    best = f"best candidate saves {percent(gain)}"
    if not math.isfinite(gain) or gain <= 0 or option.tables == 0:
        return "no candidate is faster than the current plan"
    if gain < horizon.min_gain:
        return f"{best}, below min_gain {percent(horizon.min_gain)}"
    asked = history.must_surely_save(option.plan, horizon.min_gain, moves_since)
    if option.surely <= asked:
        if option.surely <= 0:
            return f"{best}, give or take {percent(margin)}: not surely a gain"
        return f"{best}, give or take {percent(margin)}; after recent moves it must surely save {percent(asked)}"
    net, moving = _net_seconds(option, cost, horizon), cost.seconds(option.bytes, option.parts)
    if net <= 0:
        those = "left" if horizon.steps == horizon.remaining else "for which so new a change may be expected to last"
        saved = f"{net + moving:.2g} s in the {horizon.steps} steps {those}"
        return f"{best}: {saved}; moving {gib(option.bytes)} takes {moving:.2g} s"
    return ""


def percent(part: float) -> str:
    """'2%', '1.2%'"""
    return f"{100 * part:.1f}".removesuffix(".0") + "%"
