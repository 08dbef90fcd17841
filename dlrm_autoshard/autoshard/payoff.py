"""When a move pays for itself: pure arithmetic on what was predicted and measured.

    verdict = should_reshard(offer, Terms(min_gain=0.02, noise=0.01), MoveCost(bytes_per_second=1e9))
    verdict.go, verdict.text
    # True,  "7 tables, 412 MiB, about 0.41 s: predicted -14.8%"
    # False, "best candidate 1.2% faster, below min_gain 2%"

Knows no clock, no planner and no ranks. A gain is a part of the step time: 0.15 saves 15% of every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dlrm_autoshard.plan import gib


@dataclass(frozen=True)
class Offer:
    """A candidate plan beside the current one. step_ms: measured, of the current plan; remaining_steps: that would
    profit. parts: moves in which the tables would travel, where not all may at once."""

    predicted_gain: float
    step_ms: float
    remaining_steps: int
    tables: int
    bytes_to_move: int
    parts: int = 1


@dataclass(frozen=True)
class Terms:
    """What a gain must exceed, surely. noise: how far off it may be, by the spread of measurements and the model's
    error. caution: what is asked for beyond min_gain because of recent moves (see `caution_after`)."""

    min_gain: float
    noise: float = 0.0
    caution: float = 0.0


@dataclass(frozen=True)
class MoveCost:
    """What moving takes: a fixed time (agreement, new lookups, caches to warm) and a price per byte."""

    bytes_per_second: float = 0.5e9
    fixed_seconds: float = 0.1

    def seconds(self, num_bytes: int, parts: int = 1) -> float:
        return parts * self.fixed_seconds + num_bytes / self.bytes_per_second

    def learned(self, num_bytes: int, seconds: float) -> MoveCost:
        """After a move that took so long. A small one tells the fixed part, a large one the bandwidth."""
        in_transit = num_bytes / self.bytes_per_second
        if in_transit < self.fixed_seconds:
            return MoveCost(self.bytes_per_second, max(1e-3, seconds - in_transit))
        return MoveCost(num_bytes / max(seconds - self.fixed_seconds, seconds / 2), self.fixed_seconds)


@dataclass(frozen=True)
class Verdict:
    """`go`: make the move. text: the reason, with its numbers. saved_seconds: over the remaining steps, net. wait: what
    is refused now may be taken a few intervals later, when recent moves are forgotten."""

    go: bool
    text: str
    saved_seconds: float
    wait: bool = False


def should_reshard(offer: Offer, terms: Terms, cost: MoveCost) -> Verdict:
    gain, needed = offer.predicted_gain, terms.min_gain + terms.caution
    move_seconds = cost.seconds(offer.bytes_to_move, offer.parts)
    gained_seconds = gain * offer.step_ms / 1000 * offer.remaining_steps
    net = gained_seconds - move_seconds
    best = f"best candidate {percent(gain)} faster"

    def no(text: str) -> Verdict:
        return Verdict(False, text, net)

    if not math.isfinite(gain) or gain <= 0 or offer.tables == 0:
        return no("no candidate is faster than the current plan")
    if gain < terms.min_gain:
        return no(f"{best}, below min_gain {percent(terms.min_gain)}")
    if gain - terms.noise < terms.min_gain:
        return no(f"{best}, give or take {percent(terms.noise)}: not surely above min_gain {percent(terms.min_gain)}")
    if gain - terms.noise < needed:
        return replace(no(f"{best}; after recent moves {percent(needed)} are asked for"), wait=True)
    if net <= 0:
        return no(
            f"{best}, which saves {gained_seconds:.2g} s in the {offer.remaining_steps} steps left; "
            f"moving {gib(offer.bytes_to_move)} takes {move_seconds:.2g} s"
        )
    return Verdict(True, f"{moving(offer.tables, offer.bytes_to_move, move_seconds, 'about ')}: {saving(gain)}", net)


def caution_after(min_gain: float, moves_ago: list[int], left_ago: int | None, rolled_back: bool) -> float:
    """What to ask for beyond `min_gain`, so that noise can't make tables wander to and fro.

    moves_ago: intervals since each recent move: one more min_gain for each of the last three intervals' moves.
    left_ago: intervals since the candidate was the live plan, if it ever was: to return to it asks for two more, fading
    over six. rolled_back: it was measured and taken back once: four more, for good.
    """
    recent = sum(1 for ago in moves_ago if ago < 3)
    returning = 2 * max(0.0, 1 - left_ago / 6) if left_ago is not None else 0.0
    return min_gain * (recent + returning + (4 if rolled_back else 0))


def is_worse(throughput_before: float, throughput_after: float, noise: float) -> bool:
    """Whether steps take longer than before, by more than noise."""
    return measured_gain(throughput_before, throughput_after) < -noise


def measured_gain(throughput_before: float, throughput_after: float) -> float:
    """Part of the step time saved, from examples/s."""
    return 1 - throughput_before / throughput_after


def moving(tables: int, num_bytes: int, seconds: float, about: str = "") -> str:
    """'7 tables, 412 MiB, 0.31 s'"""
    return f"{tables} table{'s' if tables != 1 else ''}, {gib(num_bytes)}, {about}{seconds:.2f} s"


def saving(predicted: float, measured: float | None = None) -> str:
    """'predicted -14.8%, measured -13.9%': the change of the step time."""
    text = f"predicted {-predicted:+.1%}"
    return text if measured is None else f"{text}, measured {-measured:+.1%}"


def percent(part: float) -> str:
    """'2%', '1.2%'"""
    return f"{100 * part:.1f}".removesuffix(".0") + "%"
