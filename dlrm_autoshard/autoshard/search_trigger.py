"""When the loop looks for a better plan, and how sure it is of what intervals say: so that nothing to do costs nothing.

    attention = Attention(min_gain=0.02)
    attention.see(interval, slowness)       # every interval; slowness: of each rank, as the cost model believes
    attention.reason_not_to_look()          # "even perfect balance would save 1%, below min_gain 2%", or None
    attention.noise, attention.gain_noise   # of throughput from interval to interval, and of what balance would save

A machine that is slower for a while is slower for all ranks: throughput then says little, and which rank waits for
which still much. So there are two noises: the first judges whether a move made training faster, the second whether a
predicted gain is more than chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from dlrm_autoshard.autoshard.decision import Interval
from dlrm_autoshard.autoshard.payoff import percent
from dlrm_autoshard.costs import PLANNED_STAGES, StepProfile, balanced_cost_ms, step_cost_ms

NOISE_BELIEVED, NOISE_LEAST = 0.02, 0.005
"""Relative difference between two intervals of one plan: until some have been seen, and at least."""
CHANGED = 0.04
"""Relative difference of measured costs from which something has changed, where they are not noisier than that."""
LOOKS = 3
"""Searches in a row that found nothing, before the loop waits for something to change."""
LOOK_SHARE, LOOK_SECONDS = 0.05, (0.03, 2.0)
"""A look (refining and searching) may take this part of what there is to gain, within these bounds; below, none is
taken."""
MEDIAN_ERROR = 0.93
"""Standard error of a median: this x interquartile range / sqrt(samples)."""
REMEMBERED, AVERAGED = 12, 6
"""Differences kept; and intervals alike over which predictions average (the anchor's), at most."""


class Attention:
    def __init__(self, min_gain: float) -> None:
        self.min_gain = min_gain
        self.differences: list[float] = []  # of throughput between intervals in which nothing changed
        self.room_differences: list[float] = []  # of `room`, likewise
        self.looks = 0  # in a row that found nothing
        self.room = 0.0  # part of the step time that perfect balance would save
        self._alike = 0  # intervals in a row like the one seen last
        self._seen: Interval | None = None
        self._settled: StepProfile | None = None  # what was measured when last a whole look found nothing better
        self._best_then = ""

    def see(self, interval: Interval, slowness: Sequence[float], *, one_host: bool = True) -> None:
        last, last_room, self._seen = self._seen, self.room, interval
        ranks = interval.profile.ranks
        self.room = (step_cost_ms(ranks) - balanced_cost_ms(ranks, slowness, exchange=one_host)) / interval.step_ms
        if last is not None and not differ(last.profile, interval.profile):
            self._alike = min(self._alike + 1, AVERAGED)
            _keep(self.differences, abs(interval.throughput / last.throughput - 1))
            _keep(self.room_differences, abs(self.room - last_room))
        else:
            self._alike = 1
        if self._settled is not None and differ(self._settled, interval.profile):
            self._settled, self.looks = None, 0

    @property
    def noise(self) -> float:
        """Relative difference of throughput to be expected between intervals in which nothing changes."""
        return _typical(self.differences)

    @property
    def gain_noise(self) -> float:
        """How far off a predicted gain may be by measurements alone: as what balance would save differs from interval
        to interval, or as the steps within one scatter, if that is more. Several intervals alike are averaged."""
        scatter = MEDIAN_ERROR * self._now.profile.noise / self._now.samples**0.5
        return max(NOISE_LEAST, max(_typical(self.room_differences), scatter) / max(1, self._alike) ** 0.5)

    @property
    def seconds_to_gain(self) -> float:
        interval = self._now
        return self.room * interval.step_ms / 1000 * interval.remaining_steps

    @property
    def look_seconds(self) -> float:
        return min(LOOK_SHARE * self.seconds_to_gain, LOOK_SECONDS[1])

    @property
    def refine_seconds(self) -> float:
        """Half a look; also what a move is judged by, which is done whatever there is left to gain."""
        return max(self.look_seconds / 2, LOOK_SECONDS[0])

    def reason_not_to_look(self) -> str | None:
        """None: there may be something to find."""
        steps = self._now.remaining_steps
        if steps <= 0:
            return "no steps are left"
        if self.room < self.min_gain:
            return f"even perfect balance would save {percent(self.room)}, below min_gain {percent(self.min_gain)}"
        if self.room - self.gain_noise < self.min_gain:  # no candidate gains more, or is surer of it
            return (
                f"even perfect balance would save {percent(self.room)}, give or take {percent(self.gain_noise)}: "
                f"not surely above min_gain {percent(self.min_gain)}"
            )
        if self.looks >= LOOKS:
            return f"nothing has changed ({self._best_then})"
        if self.look_seconds < LOOK_SECONDS[0]:
            return f"at most {self.seconds_to_gain:.2g} s to gain in the {steps} steps left"
        return None

    def found(self) -> None:
        self._settled, self.looks = None, 0

    def found_nothing(self, best: str) -> None:
        self._settled, self._best_then = self._now.profile, best
        self.looks += 1

    @property
    def _now(self) -> Interval:
        assert self._seen is not None, "no interval has been seen"
        return self._seen

    def state_dict(self) -> dict[str, Any]:
        """What was found in earlier looks is not kept, so that a job that goes on looks again."""
        return {"differences": self.differences, "room_differences": self.room_differences}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.differences, self.room_differences = list(state["differences"]), list(state["room_differences"])


def differ(one: StepProfile, other: StepProfile) -> bool:
    """Whether the ranks' compute costs have changed: data have drifted, or a rank has become slower or faster."""
    if one.plan != other.plan:
        return True
    total = sum(rank.total_ms for rank in one.ranks)
    changes = [
        abs(a.stage(s) - b.stage(s)) for a, b in zip(one.ranks, other.ranks, strict=True) for s in PLANNED_STAGES
    ]
    return sum(changes) > max(CHANGED, one.noise, other.noise) * total


def _keep(values: list[float], value: float) -> None:
    values.append(value)
    del values[:-REMEMBERED]


def _typical(differences: Sequence[float]) -> float:
    return max(NOISE_LEAST, median(differences)) if len(differences) > 1 else NOISE_BELIEVED
