"""When resharding learns and searches, and how far intervals scatter: nothing is spent where nothing is to gain.

trigger = SearchTrigger(min_gain=0.02, budget_seconds=20)
trigger.reason_not_to_look(interval)         # "nothing has changed since step 400", or None: learn from it, and
trigger.see(interval, slowness, learned)     # slowness: of each rank, times longer for the same work
trigger.reason_not_to_search()               # "even perfect balance would save 1%, below min_gain 2%", or None
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.decision import Interval, percent
from dlrm_autoshard.costs import PLANNED_STAGES, RankCost, StepProfile, balance_gain

HALVES_SECONDS = 0.3
"""That telling whether a half is worth measuring may take in any case: a cost of all tables anew, and a search."""


class SearchTrigger:
    """Gains are judged by `gain_scatter`, of what perfect balance would save. A machine that is slower for a while is
    slower for all ranks: throughput then says little, and which rank waits for which still much.
    """

    def __init__(self, min_gain: float, budget_seconds: float = float("inf")) -> None:
        """budget_seconds: that a search may take after an interval, at most."""
        self.min_gain, self.budget_seconds = min_gain, budget_seconds
        self.gain_differences: list[float] = []  # of `balance_gain` between intervals in which nothing changed
        self._took = self._spent = 0.0  # seconds: of this interval's searches, and of those that found nothing here
        self.balance_gain = 0.0  # part of the step time that perfect balance would save
        self._error = 0.0  # standard error of that, by the interval's own steps
        self._alike = 0  # intervals in a row like the one seen last
        self._alike_since = 0  # the step after which the first of them ended
        self._looks = [0.0]  # seconds that learning and deciding took, of the last ones
        self._seen: Interval | None = None
        self._settled: StepProfile | None = None  # what was measured when last a search found nothing better
        self._best_then = ""
        self._expected = self._expected_then = 0.0  # `balance_gain` by all that was learned; when a search had settled
        self._gain_then = 0.0  # what the best candidate saved then

    def reason_not_to_look(self, interval: Interval) -> str | None:
        """Where learning from this interval and deciding on it would take more than it is worth, for it is like the
        last that was looked at.

        Of what has lasted for t steps the next change is as far off as not. Looks that are k steps apart see it k / 2
        steps late, each of which takes longer by what there is to gain, g; that and looks that take c steps cost least
        together with k = sqrt(2 c t / g). A change that shows at once is noticed by the sampled steps themselves.
        """
        last = self._seen
        if last is None or interval.changed_steps is not None or interval.remaining_steps <= 0:
            return None
        since, apart = interval.step - self._alike_since, interval.step - last.step
        look_steps, gain = 1000 * median(self._looks) / interval.step_ms, max(self.balance_gain, self.min_gain)
        if apart**2 * gain >= 2 * look_steps * since or differ(last.profile, interval.profile):
            return None
        return f"nothing has changed since step {last.step:,}"

    def looked(self, seconds: float) -> None:
        """That learning and deciding took."""
        _keep(self._looks, seconds)

    def see(
        self,
        interval: Interval,
        slowness: Sequence[float],
        learned: Sequence[RankCost] | None = None,
        *,
        one_host: bool = True,
    ) -> None:
        """learned: what each rank takes now, by all that was learned."""
        last, last_gain, self._seen = self._seen, self.balance_gain, interval
        self._took = 0.0
        self.balance_gain, self._error = interval.balance_gain(slowness, exchange=one_host)
        ranks = interval.profile.ranks if learned is None else learned
        self._expected = balance_gain(ranks, interval.step_ms, slowness, exchange=one_host)
        # A change that was noticed is one, however little the few steps since then are sure of.
        changed = interval.changed_steps is not None and (
            last is None or last.changed_steps is None or interval.changed_steps < last.changed_steps
        )
        if last is not None and not changed and not differ(last.profile, interval.profile):
            self._alike = min(self._alike + 1, thresholds.MEMORY)
            _keep(self.gain_differences, abs(self.balance_gain - last_gain))
        else:
            self._alike, self._alike_since = 1, interval.step
        if self._settled is not None and (changed or differ(self._settled, interval.profile) or self._has_drifted):
            self._settled, self._spent = None, 0.0

    @property
    def _has_drifted(self) -> bool:
        """Slowly, below what two intervals differ by anyway: a candidate might save `min_gain` by now."""
        grown = self._expected - self._expected_then
        return grown > max(self.min_gain - self._gain_then, self.min_gain / 2)

    @property
    def is_as_before(self) -> bool:
        """Whether the interval seen last is like the one before it."""
        return self._alike > 1

    @property
    def gain_scatter(self) -> float:
        """How far off a gain may be by measurements alone: as what balance would save differs from interval to
        interval, or from step to step within one, if that is more. Several intervals alike are averaged."""
        return max(_typical(self.gain_differences), self._error) / max(1, self._alike) ** 0.5

    @property
    def seconds_to_gain(self) -> float:
        interval = self._now
        return self.balance_gain * interval.step_ms / 1000 * interval.remaining_steps

    @property
    def search_seconds(self) -> float:
        """What a search may take, those before it that found nothing here counted."""
        return min(thresholds.SEARCH_SHARE * self.seconds_to_gain - self._spent, self.budget_seconds)

    @property
    def halves_seconds(self) -> float:
        """What it may take to tell whether a half is worth measuring. Searches that found nothing do not count: that
        is worth more the longer a change lasts."""
        return max(HALVES_SECONDS, min(thresholds.SEARCH_SHARE * self.seconds_to_gain, self.budget_seconds) / 4)

    def reason_not_to_search(self) -> str | None:
        """None: there may be something to find."""
        steps = self._now.remaining_steps
        if steps <= 0:
            return "no steps are left"
        most = f"even perfect balance would save {percent(self.balance_gain)}"
        if self.balance_gain < self.min_gain:
            return f"{most}, below min_gain {percent(self.min_gain)}"
        margin = thresholds.SURE * self.gain_scatter
        if self.balance_gain < margin:  # no candidate gains more, or is surer of it
            return f"{most}, give or take {percent(margin)}: not surely a gain"
        if self.seconds_to_gain <= thresholds.MOVE_SECONDS:
            return f"at most {self.seconds_to_gain:.2g} s to gain in the {steps} steps left"
        return None if self.search_seconds > 0 else f"nothing has changed ({self._best_then})"

    def searched(self, seconds: float) -> None:
        """A search took so long; there may be two after an interval. `search_anew` or `found_nothing` says what came of
        it."""
        self._took += seconds

    def search_anew(self) -> None:
        """Something was found, or learned beside what training steps tell."""
        self._settled, self._spent = None, 0.0

    def found_nothing(self, best: str, gain: float = 0.0) -> None:
        """best: what is to be said of the best that was found; gain: it saves, a part of a step."""
        if self._settled is None:
            self._expected_then = self._expected
        self._settled, self._best_then, self._gain_then = self._now.profile, best, max(0.0, gain)
        self._spent += self._took

    @property
    def _now(self) -> Interval:
        assert self._seen is not None, "no interval has been seen"
        return self._seen

    def state_dict(self) -> dict[str, Any]:
        """What was found in earlier searches is not kept, so that a job that goes on searches again."""
        return {"gain_differences": list(self.gain_differences)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gain_differences = list(state["gain_differences"])


def differ(one: StepProfile, other: StepProfile) -> bool:
    """Whether the ranks' compute costs have changed: data have drifted, or a rank has become slower or faster."""
    if one.plan != other.plan:
        return True
    total = sum(rank.total_ms for rank in one.ranks)
    changes = [
        abs(a.stage(s) - b.stage(s)) for a, b in zip(one.ranks, other.ranks, strict=True) for s in PLANNED_STAGES
    ]
    scatter = math.hypot(one.standard_error, other.standard_error)
    return sum(changes) > thresholds.SURE * max(thresholds.USUAL_SCATTER, scatter) * total


def _keep(values: list[float], value: float) -> None:
    values.append(value)
    del values[: -2 * thresholds.MEMORY]


def _typical(differences: Sequence[float]) -> float:
    return median([thresholds.USUAL_SCATTER, *differences])
