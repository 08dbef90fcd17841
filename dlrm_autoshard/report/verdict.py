"""A run's verdict: what autoshard did to its speed, who is slowest and why, what placement could save.

for sentence in verdict(record): print(sentence)
autoshard_in_one_line(record)      # "1 move, 23.9k -> 28.8k examples/s (+21%), paid back after 12 steps"
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dlrm_autoshard.formats.words import count
from dlrm_autoshard.records.interval import IntervalProfile
from dlrm_autoshard.records.run import RunRecord

_WORTH_SAYING = 0.01
"""Of a step: less is no reason to change a config."""


def verdict(record: RunRecord) -> list[str]:
    """Three sentences or so."""
    said = [f"Autoshard: {autoshard_in_one_line(record)}."] if record.decisions else []
    if record.intervals and record.last.world_size == 1:
        said.append("One rank has all tables: there is nothing to place.")
    elif record.intervals:
        left = left_to_save(record)
        said += [*who_is_slow(record.last), *what_is_left(record.last, left)]
        if not record.decisions and left >= _WORTH_SAYING:
            said.append("Tables stayed where they were put at the start (autoshard.enabled, autoshard.reshard).")
            if record.config:
                said[-1] += " What another plan would gain: dlrm-autoshard explain RUN."
    return said


def autoshard_in_one_line(record: RunRecord) -> str:
    """What resharding did: the speed before and after a move, or of several what each saved. Between the first of
    several and the last one anything may have become slower or faster by itself."""
    done = Counter(str(decision.get("action")) for decision in record.decisions)
    moves = [decision for decision in record.decisions if decision.get("action") == "moved"]
    others = [
        f"{done[action]} {words}"
        for action, words in (("rolled_back", "taken back"), ("refused", "refused for want of memory"))
        if done[action]
    ]
    if not moves:
        kept = f"no move in {count(len(record.decisions), 'decision')}"
        return ", ".join([kept, *others]) + f" ({_last_reason(record.decisions)})"
    parts = [count(len(moves), "move"), *others]
    actions = [decision.get("action") for decision in record.decisions]
    if "rolled_back" in actions and actions[::-1].index("rolled_back") < actions[::-1].index("moved"):
        return ", ".join([*parts, "the last move among them"])  # whose speed was left
    if len(moves) == 1:
        before, after = (moves[0].get(f"throughput_{when}") for when in ("before", "after"))
        told = (
            before and after and f"{_thousands(before)} -> {_thousands(after)} examples/s ({after / before - 1:+.0%})"
        )
    else:
        told = _gains_told(record.decisions)
    if not told:
        return ", ".join([*parts, "what that gained was not measured: no interval followed"])
    parts.append(told)
    paid = [steps for decision in moves if (steps := decision.get("paid_back_after_steps")) is not None]
    if paid:
        parts.append(f"paid back after {' and '.join(f'{steps:,}' for steps in paid[:4])} steps")
    return ", ".join(parts)


def who_is_slow(profile: IntervalProfile) -> list[str]:
    if profile.world_size == 1 or profile.samples == 0:
        return []
    if profile.straggler is None:
        return ["No rank holds the others up: their differences are below 3% of the step."]
    said = profile.straggler.sentence
    return [said[0].upper() + said[1:]]


def left_to_save(record: RunRecord) -> float:
    """The part of the last interval's step that perfect balance would save: the figure that autoshard decided by, which
    knows the ranks' speeds, where it decided on that interval."""
    for decision in reversed(record.decisions):
        if decision.get("step") == record.last.end_step and decision.get("balance_gain") is not None:
            return float(decision["balance_gain"])
    return record.last.balance_gain


def what_is_left(profile: IntervalProfile, gain: float | None = None) -> list[str]:
    """gain: what perfect balance would save of a step, where more is known than the profile says."""
    if profile.world_size == 1 or profile.samples == 0:
        return []
    gain = profile.balance_gain if gain is None else gain
    if gain < 0.001:
        return ["In the last interval perfect balance would have saved nothing more."]
    return [f"In the last interval perfect balance would have saved {gain:.1%} of a step more, at most."]


def _gains_told(decisions: Sequence[Mapping[str, Any]]) -> str | None:
    """Of moves that were not taken back."""
    actions = [decision.get("action") for decision in decisions] + [None]
    known = [
        float(move["measured_gain"])
        for move, (action, following) in zip(decisions, itertools.pairwise(actions), strict=True)
        if action == "moved" and following != "rolled_back" and move.get("measured_gain") is not None
    ]
    if not known:
        return None
    each = " and ".join(f"{round(100 * gain, 1) + 0.0:.1f}%" for gain in known)
    told = each if len(known) <= 3 else f"{100 * min(known):.1f} to {100 * max(known):.1f}%"
    return f"{told} of a step saved, each against the interval before it"


def _thousands(rate: float) -> str:
    return f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.0f}"


def _last_reason(decisions: tuple[Mapping[str, Any], ...]) -> str:
    """Why tables stayed, and when: the last reason that says something of the plan, not of the run's end."""
    reasons = [(d.get("step"), str(d.get("text") or d.get("action")).removeprefix("kept: ")) for d in decisions]
    silent = ("no steps are left", "nothing has changed since")
    step, reason = next((found for found in reversed(reasons) if not found[1].startswith(silent)), reasons[-1])
    return reason if step is None else f"at step {step:,}: {reason}"
