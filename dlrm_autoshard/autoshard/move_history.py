"""The moves that were made, or refused, as far as the next one depends on them.

history.moved(old_plan, in_parts=False)
history.caution(0.02, plan, moves_since=0)      # 0.01: part of a step that `plan` must surely save
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.payoff import caution_after
from dlrm_autoshard.plan import ShardingPlan


@dataclass
class History:
    """Times are counted in intervals."""

    intervals: int = 0
    moves_at: list[int] = field(default_factory=list)
    left_at: dict[str, int] = field(default_factory=dict)  # plan fingerprint -> when it stopped being the live one
    rolled_back: list[str] = field(default_factory=list)
    refused_at: dict[str, int] = field(default_factory=dict)  # plan fingerprint -> when a rank could not take it
    in_parts: bool = False  # the last move was a part of a larger one

    def moved(self, old_plan: ShardingPlan, *, in_parts: bool) -> None:
        """A move in parts counts once, when its last part is made."""
        if self.in_parts:
            self.moves_at.pop()
        self.moves_at.append(self.intervals)
        self.left_at[old_plan.fingerprint] = self.intervals
        self.in_parts = in_parts

    def refused_lately(self, plan: ShardingPlan) -> bool:
        """Later there may be memory for it."""
        at = self.refused_at.get(plan.fingerprint) if self.refused_at else None
        return at is not None and self.intervals - at <= thresholds.MEMORY

    def caution(self, min_gain: float, plan: ShardingPlan, moves_since: int) -> float:
        """What must surely be saved. moves_since: the last ones, that were made for what is decided on now."""
        name = plan.fingerprint
        left_ago = self.intervals - self.left_at[name] if name in self.left_at else None
        moves_ago = [self.intervals - at for at in self.moves_at[: max(0, len(self.moves_at) - moves_since)]]
        return caution_after(min_gain, moves_ago, left_ago, name in self.rolled_back)
