"""When a move pays for itself: pure arithmetic on what was predicted and measured.

    why = reason_to_stay(proposal, interval, MoveCost(bytes_per_second=1e9), min_gain=0.02)
    # None: go; or "best candidate saves 1.2%, below min_gain 2%"

Knows no clock, no planner and no ranks. A gain is a part of the step time: 0.15 saves 15% of every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.decision import Interval, Proposal, percent
from dlrm_autoshard.formats.words import gib

Price = Annotated[float, Field(gt=0, le=1e18)]


@dataclass(frozen=True)
class MoveCost:
    """What moving takes: a fixed time (agreement, new lookups, caches to warm) and a price per byte."""

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


def seconds_saved(proposal: Proposal, interval: Interval, cost: MoveCost) -> float:
    """Over the steps for which that lasts, less what moving takes."""
    gained = proposal.gain * interval.step_ms / 1000 * interval.lasting_steps
    return gained - cost.seconds(proposal.bytes, proposal.parts)


def reason_to_stay(
    proposal: Proposal, interval: Interval, cost: MoveCost, min_gain: float, caution: float = 0.0
) -> str | None:
    """None where the move is expected to gain `min_gain`, surely gains what caution asks for, and pays for itself.

    That it surely gains all of `min_gain` was asked for where no change was noticed: three simulated jobs whose pooling
    drifts recovered 0.38, 0.59 and 0.19 of what a clairvoyant gains then, and 0.45, 0.76 and 0.39 without.
    """
    gain, margin = proposal.gain, thresholds.SURE * proposal.uncertainty
    best = f"best candidate saves {percent(gain)}"
    if not math.isfinite(gain) or gain <= 0 or proposal.tables == 0:
        return "no candidate is faster than the current plan"
    if gain < min_gain:
        return f"{best}, below min_gain {percent(min_gain)}"
    if gain < margin:
        return f"{best}, give or take {percent(margin)}: not surely a gain"
    if gain - margin < caution:
        return f"{best}, give or take {percent(margin)}; after recent moves it must surely save {percent(caution)}"
    net = seconds_saved(proposal, interval, cost)
    if net <= 0:
        move_seconds = cost.seconds(proposal.bytes, proposal.parts)
        steps = interval.lasting_steps
        those = "left" if steps == interval.remaining_steps else "for which so new a change may be expected to last"
        return (
            f"{best}: {net + move_seconds:.2g} s in the {steps} steps {those}; "
            f"moving {gib(proposal.bytes)} takes {move_seconds:.2g} s"
        )
    return None


def saved_on_average(known: Sequence[Proposal], interval: Interval, cost: MoveCost, min_gain: float) -> float:
    """Seconds, over draws of what one move may be known to gain, where it is made if it pays then, and else not."""
    paying = [one for one in known if reason_to_stay(one, interval, cost, min_gain) is None]
    return sum(seconds_saved(one, interval, cost) for one in paying) / len(known)


def caution_after(min_gain: float, moves_ago: Iterable[int], left_ago: int | None, rolled_back: bool) -> float:
    """What a move must surely save, so that noise can't move tables to and fro.

    One min_gain for each recent move (moves_ago: intervals since then), fading with time; as much again to return
    to a plan that was left so many intervals ago; and as much, for good, where the plan was measured and taken back.
    """
    ago = [*moves_ago, *([] if left_ago is None else [left_ago]), *([0] if rolled_back else [])]
    return min_gain * sum(max(0.0, 1 - past / thresholds.MEMORY) for past in ago)
