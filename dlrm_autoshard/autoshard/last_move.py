"""Judges a move by sampled steps under the plan that it left and under the one that it made.

last.keep(interval, change_began)                # after each interval, until it is judged
last.judged(planner, task, interval)             # its decision with measured_gain, or None where too little is known
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import TypedDict

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.decision import Decision, Interval
from dlrm_autoshard.formats.json_file import checked
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.records.move_worth import TimedSteps, worth_of


class LastMoveRecord(TypedDict):
    """JSON form of `LastMove`."""

    decision: dict[str, Any]
    before: dict[str, Any] | None
    early: bool
    after: dict[str, Any] | None
    ranks_changed: bool


@dataclass
class LastMove:
    """A move that was carried out and is not yet judged.

    before: steps under the plan that it left. early: whether these were the first steps of a change. after: steps since
    the move, while nothing else changed. ranks_changed: whether a rank has become slower or faster since.
    """

    decision: Decision
    before: TimedSteps | None
    early: bool
    after: TimedSteps | None = None
    ranks_changed: bool = False

    def keep(self, interval: Interval, change_began: int | None) -> None:
        """Adds an interval's steps. change_began: the step after which something else changed in it."""
        if change_began is None:
            self.after = interval.timed.after(self.after)
        elif self.after is None:
            self.after = interval.before_change

    def learned(self, interval: Interval, change_began: int | None, *, ranks_changed: bool) -> None:
        """Takes in what the planner has learned of ranks: a change that came with the move, and is not theirs, is the
        move's own doing."""
        self.ranks_changed |= ranks_changed and (self.after is None or change_began is None)
        if self.after is None and not self.ranks_changed:
            self.after = interval.timed

    def judged(self, planner: Planner, task: PlacementTask, interval: Interval) -> Decision | None:
        """Returns the decision with what the move was worth: the old plan's steps before it, or what they would cost
        now, beside the new plan's."""
        move, before, after = self.decision, self.before, self.after
        if before is None or after is None:
            return None
        assert move.new_plan is not None and move.old_plan is not None and move.predicted_gain is not None
        # A change's first steps are slower than later ones: they tell nothing of settled steps, nor does a prediction
        # made by them.
        unsettled = self.early and not interval.early
        predicted, instead = (move.predicted_gain, move.uncertainty or 0.0), None
        if unsettled or self.ranks_changed or not before.alike(after):
            [gain] = planner.gains(task, move.new_plan, [move.old_plan])
            instead = 1 - gain.mean, gain.std
        else:
            # The prediction was a part of the step of then; the part that no plan decides may take longer now.
            then = before.step_ms / max(after.step_ms + predicted[0] * before.step_ms, 1e-9)
            predicted = predicted[0] * then, predicted[1] * then
        if unsettled:
            before, predicted = after, (predicted[0], math.inf)
        worth = worth_of(before, after, predicted=predicted, scatter=thresholds.USUAL_SCATTER, instead=instead)
        saved_ms = worth.saved_ms(interval.step_ms)
        pays_back = not worth.doubt and saved_ms > 0
        return replace(
            move,
            measured_gain=worth.gain,
            measured_low=worth.low,
            measured_high=worth.high,
            doubt=worth.doubt or None,
            paid_back_after_steps=round(1000 * move.move_seconds / saved_ms) if pays_back else None,
        )

    def to_json(self) -> dict[str, Any]:
        steps = {"before": self.before and self.before.to_json(), "after": self.after and self.after.to_json()}
        own = {"early": self.early, "ranks_changed": self.ranks_changed}
        return {"decision": self.decision.state_dict(), **steps, **own}

    @staticmethod
    def from_json(state: Mapping[str, Any]) -> LastMove:
        """Returns the move of a checkpoint; FormatError names the key that is wrong."""
        record = checked(LastMoveRecord, state)
        before, after = TimedSteps.from_json(record["before"]), TimedSteps.from_json(record["after"])
        decision = Decision.from_state_dict(record["decision"])
        return LastMove(decision, before, record["early"], after, record["ranks_changed"])
