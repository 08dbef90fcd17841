"""A run's verdict: what autoshard did to its speed, who is slowest and why, what placement could save.

for sentence in verdict(record): print(sentence)
autoshard_in_one_line(record)      # "1 move, 23.9k -> 28.8k examples/s (+21%), paid back after 12 steps"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dlrm_autoshard.records.epoch import EpochProfile
from dlrm_autoshard.records.run import RunRecord


def verdict(record: RunRecord) -> list[str]:
    """At most three sentences."""
    said = [f"Autoshard: {autoshard_in_one_line(record)}."] if record.decisions else []
    if record.epochs and record.last.world_size == 1:
        said.append("One rank has all tables: there is nothing to place.")
    elif record.epochs:
        said += [*who_is_slow(record.last), *what_is_left(record.last, left_to_save(record))]
    return said


def autoshard_in_one_line(record: RunRecord) -> str:
    """What resharding did, with the speed before its first move and after its last one."""
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
    before, after = (_first(ds, key) for ds, key in ((moves, "throughput_before"), (moves[::-1], "throughput_after")))
    if before is None or after is None:
        return ", ".join([*parts, "what that gained was not measured: no interval followed"])
    parts.append(f"{_thousands(before)} -> {_thousands(after)} examples/s ({after / before - 1:+.0%})")
    paid = [steps for decision in moves if (steps := decision.get("paid_back_after_steps")) is not None]
    if paid:
        parts.append(f"paid back after {' and '.join(f'{steps:,}' for steps in paid[:4])} steps")
    return ", ".join(parts)


def who_is_slow(profile: EpochProfile) -> list[str]:
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


def what_is_left(profile: EpochProfile, gain: float | None = None) -> list[str]:
    """gain: what perfect balance would save of a step, where more is known than the profile says."""
    if profile.world_size == 1 or profile.samples == 0:
        return []
    gain = profile.balance_gain if gain is None else gain
    if gain < 0.001:
        return ["In the last interval perfect balance would have saved nothing more."]
    return [f"In the last interval perfect balance would have saved {gain:.1%} of a step more, at most."]


def count(number: int, thing: str) -> str:
    """'1 move', '3 moves'."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _first(decisions: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((float(decision[key]) for decision in decisions if decision.get(key)), None)


def _thousands(rate: float) -> str:
    return f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.0f}"


def _last_reason(decisions: tuple[Mapping[str, Any], ...]) -> str:
    """Why tables stayed, and when: the last reason that says something of the plan, not of the run's end."""
    reasons = [(d.get("step"), str(d.get("text") or d.get("action")).removeprefix("kept: ")) for d in decisions]
    step, reason = next((found for found in reversed(reasons) if found[1] != "no steps are left"), reasons[-1])
    return reason if step is None else f"at step {step:,}: {reason}"
