"""Judges a move by sampled steps under the plan that it left and under the one that it made.

last = LastMove(decision, before, early)
last.judged(planner, task, interval)             # its decision with measured_gain
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import TypedDict

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.decision import Decision, Interval
from dlrm_autoshard.formats.json_file import checked, made
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.records.move_worth import TimedSteps, worth_of


class LastMoveRecord(TypedDict):
    """JSON form of `LastMove`."""

    decision: dict[str, Any]
    before: dict[str, Any]
    early: bool


@dataclass
class LastMove:
    """A move that was made and is not yet judged. before: steps under the plan that it left. early: whether these
    were the first steps after a change."""

    decision: Decision
    before: TimedSteps
    early: bool

    def judged(self, planner: Planner, task: PlacementTask, interval: Interval) -> Decision:
        """Returns the decision with the move's measured gain: the old plan's steps, or their cost now if data or
        ranks have changed, beside the new plan's in `interval`."""
        move, before, after = self.decision, self.before, interval.timed
        assert move.new_plan is not None and move.old_plan is not None and move.predicted_gain is not None
        predicted, instead = (move.predicted_gain, move.uncertainty or 0.0), None
        # The few steps that showed a change were decided on because they stood out, so they overstate it, and a
        # prediction made by them may.
        if self.early or planner.costs.ranks_changed or not before.alike(after):
            [gain] = planner.gains(task, move.new_plan, [move.old_plan])
            instead = 1 - gain.mean, gain.std
        else:
            # The prediction was a part of the step of then; the part that no plan decides may take longer now.
            then = before.step_ms / max(after.step_ms + predicted[0] * before.step_ms, 1e-9)
            predicted = predicted[0] * then, predicted[1] * then
        if self.early:
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
        return {"decision": self.decision.state_dict(), "before": self.before.to_json(), "early": self.early}

    @staticmethod
    def from_json(state: Mapping[str, Any]) -> LastMove:
        """Parses a checkpoint's move; FormatError names a bad key."""
        record = checked(LastMoveRecord, state)
        decision = Decision.from_state_dict(record["decision"])
        return LastMove(decision, made(TimedSteps, record["before"]), record["early"])
