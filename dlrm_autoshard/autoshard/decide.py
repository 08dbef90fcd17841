"""Decides whether tables should move, and to which plan: pure functions of what the plans may save.

choice = decide(options, MoveCost(), Horizon(step_ms=20.0, steps=4000, min_gain=0.01))
choice.option, choice.best, choice.why        # None: stay, and why; a plan that was left is an option like others

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
from dlrm_autoshard.records.diagnosis import NOTABLE_DRIFT, moved_part

Price = Annotated[float, Field(gt=0, le=1e18)]


@dataclass(frozen=True)
class MoveCost:
    """Seconds that a move takes: a fixed time (agreement, new lookups, caches to warm) and a price for each byte."""

    bytes_per_second: Price = thresholds.MOVE_BYTES_PER_SECOND
    fixed_seconds: Price = thresholds.MOVE_SECONDS

    def seconds(self, num_bytes: int, parts: int = 1) -> float:
        return parts * self.fixed_seconds + num_bytes / self.bytes_per_second

    def learned(self, num_bytes: int, seconds: float) -> MoveCost:
        """Returns the cost updated by a move that took so long. A small move tells the fixed time, a large one the
        bandwidth; at least half of the time is credited to the one that it tells."""
        in_transit = num_bytes / self.bytes_per_second
        if in_transit < self.fixed_seconds:
            return MoveCost(self.bytes_per_second, max(seconds - in_transit, seconds / 2))
        return MoveCost(num_bytes / max(seconds - self.fixed_seconds, seconds / 2), self.fixed_seconds)


@dataclass(frozen=True)
class Option:
    """A plan that tables could move to. saved_D: fractions of the step that it may save, in draws from the
    posterior. tables, bytes: what would travel, in `parts` moves."""

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
        """Standard deviation of the gain."""
        return float(self.saved_D.std())

    @property
    def surely(self) -> float:
        """Gain that is exceeded with probability `SURE`."""
        return float(np.quantile(self.saved_D, 1 - thresholds.SURE))


class Horizon(NamedTuple):
    """steps: steps to come. min_gain, surely: fractions of the step that a move must save on average, and surely."""

    step_ms: float
    steps: int
    min_gain: float
    surely: float = 0.0


@dataclass
class History:
    """State that earlier looks and refusals leave for the next look.

    look_seconds: duration of the last look. out_of_reach: fraction of the step that balance would save but no plan of
    the last look did. searched: lookups by table then. moved_at: number of intervals at the last whole move.
    refused_at: plan fingerprint -> number of intervals when a rank refused it.
    """

    intervals: int = 0
    moved_at: int | None = None
    refused_at: dict[str, int] = field(default_factory=dict)
    look_seconds: float = 0.0
    out_of_reach: float = 0.0
    searched: tuple[float, ...] = ()

    def changed(self, lookups: Sequence[float], *, noticed: bool) -> None:
        """Puts all within reach again if a change was noticed, or if data drifted since the last search. lookups: by
        table."""
        drifted = bool(self.searched) and moved_part(self.searched, lookups) >= NOTABLE_DRIFT
        if noticed or drifted:
            self.out_of_reach = 0.0

    def why_not_look(self, balance: float, when: Horizon) -> str:
        """Returns why no search is worth its time, or "" if one is. balance: fraction of the step that perfect balance
        would save.

        A search may gain only what is new in the balance, as the last one found no plan for the rest. So while nothing
        changes, all looks together take at most `LOOK_SHARE` of what balance would save in the job, and become ever
        rarer: each noisy interval is less likely to exceed all earlier ones.
        """
        if when.steps <= 0:
            return "no steps are left"
        if balance < when.min_gain:
            return below_min_gain(balance, when)
        if balance - self.out_of_reach < when.min_gain:
            return f"perfect balance would save {percent(balance)}, about what the last search found no plan for"
        seconds = self._seconds_at_stake(balance, when)
        if seconds <= thresholds.MOVE_SECONDS:
            return f"at most {seconds:.2g} s to gain in the {when.steps} steps left"
        if self.look_seconds > self.search_seconds(balance, when):
            return f"at most {seconds:.2g} s to gain, and a search takes {self.look_seconds:.2g} s"
        return ""

    def search_seconds(self, balance: float, when: Horizon) -> float:
        """Returns the seconds that a search may take."""
        return thresholds.LOOK_SHARE * self._seconds_at_stake(balance, when)

    def _seconds_at_stake(self, balance: float, when: Horizon) -> float:
        return max(0.0, balance - self.out_of_reach) * when.step_ms / 1000 * when.steps

    def looked(
        self, seconds: float, balance: float, best_gain: float, lookups: Sequence[float] = (), *, early: bool
    ) -> None:
        """Records a look. best_gain: gain of the best plan. early: the look rested on the few steps since a change,
        too few to call anything out of reach."""
        self.look_seconds, self.out_of_reach = seconds, 0.0 if early else balance - max(0.0, best_gain)
        self.searched = tuple(lookups)

    def refused_lately(self, plan: ShardingPlan) -> bool:
        """Returns whether a rank refused the plan in the last intervals; later there may be memory for it."""
        return self._lately(self.refused_at.get(plan.fingerprint))

    def must_surely_save(self, min_gain: float) -> float:
        """Returns what a move must surely save: 0, or `min_gain` soon after a move, so that noise does not move
        tables to and fro."""
        return min_gain if self._lately(self.moved_at) else 0.0

    def _lately(self, at: int | None) -> bool:
        return at is not None and self.intervals - at <= thresholds.MEMORY


class Choice(NamedTuple):
    """option: the plan to move to; None: stay, because of `why`. best: the option that saves most seconds, taken or
    not."""

    option: Option | None
    best: Option
    why: str = ""


def decide(options: Sequence[Option], cost: MoveCost, when: Horizon) -> Choice:
    """Returns the option that saves most seconds in the remaining steps, among those that save `min_gain` on
    average, surely more than `surely`, and more than the move takes."""
    ordered = sorted(options, key=lambda one: _net_seconds(one, cost, when), reverse=True)
    reasons = [_reason_to_stay(one, cost, when) for one in ordered]
    for option, why in zip(ordered, reasons, strict=True):
        if not why:
            return Choice(option, option)
    return Choice(None, ordered[0], reasons[0])


def _net_seconds(option: Option, cost: MoveCost, when: Horizon) -> float:
    return option.gain * when.step_ms / 1000 * when.steps - cost.seconds(option.bytes, option.parts)


def _reason_to_stay(option: Option, cost: MoveCost, when: Horizon) -> str:
    gain = option.gain
    best = f"best candidate saves {percent(gain)}"
    if not math.isfinite(gain) or gain <= 0 or option.tables == 0:
        return "no candidate is faster than the current plan"
    if gain < when.min_gain:
        return f"{best}, below min_gain {percent(when.min_gain)}"
    if option.surely <= when.surely:
        margin = percent(gain - option.surely)
        if option.surely <= 0:
            return f"{best}, give or take {margin}: not surely a gain"
        return f"{best}, give or take {margin}; after recent moves it must surely save {percent(when.surely)}"
    net, moving = _net_seconds(option, cost, when), cost.seconds(option.bytes, option.parts)
    if net <= 0:
        saved = f"{net + moving:.2g} s in the {when.steps} steps left"
        return f"{best}: {saved}; moving {gib(option.bytes)} takes {moving:.2g} s"
    return ""


def below_min_gain(balance: float, when: Horizon) -> str:
    """Says that perfect balance would save too little."""
    return f"even perfect balance would save {percent(balance)}, below min_gain {percent(when.min_gain)}"


def percent(part: float) -> str:
    """Returns a fraction as text: '2%', '1.2%'."""
    return f"{100 * part:.1f}".removesuffix(".0") + "%"
