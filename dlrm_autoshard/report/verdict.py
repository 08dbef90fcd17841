"""A run's verdict: what autoshard gained, which rank is slowest and why, what placement could still save.

for sentence in verdict(record): print(sentence)
autoshard_in_one_line(record)      # "1 move ('ad' from rank 1 to 0): saved 18.2% (15.0 to 21.4%) of a step, paid ..."
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dlrm_autoshard.formats.words import count
from dlrm_autoshard.records.decisions import moves_in_words, worth_in_words
from dlrm_autoshard.records.diagnosis import describe_straggler
from dlrm_autoshard.records.interval import IntervalProfile
from dlrm_autoshard.records.run import RunRecord

_WORTH_SAYING = 0.01
"""Fraction of a step: smaller gains are not worth a change of config."""
_NOT_BY_LOAD = {"starved of CPU": "other work on its CPU core", "slow data": "its data loader"}


def bottom_line(record: RunRecord) -> str:
    """Returns whether the placement can be improved, in one sentence; "" without profiles."""
    if not record.intervals:
        return ""
    profile, balance = record.reported, record.balance(record.reported)
    if profile.world_size == 1:
        return "With one rank there is nothing to place."
    straggler = profile.straggler
    if straggler is not None and straggler.cause != "load":
        return f"Rank {straggler.rank} is slowed by {_NOT_BY_LOAD[straggler.cause]}, which no plan can change."
    if balance is None or not math.isfinite(balance.low):
        return "Too few steps were sampled to judge the placement."
    if balance.low <= 0 or balance.gain < _WORTH_SAYING:
        most = f"perfect balance would save at most {max(0.0, balance.high):.1%} of a step"
        return f"The plan is as good as balanced: {most}."
    why = why_tables_stay(record.decisions) if record.decisions else "resharding is off"
    return f"Perfect balance would save {balance.gain:.1%} of a step; {why}."


def why_tables_stay(decisions: Sequence[Mapping[str, Any]]) -> str:
    """Returns what searches since the last move found."""
    since = itertools.takewhile(lambda decision: decision.get("action") != "moved", reversed(decisions))
    best = next((decision for decision in since if (decision.get("predicted_gain") or 0.0) > 0), None)
    if best is None:
        return "no plan with a significant gain was found"
    when = f" at step {best['step']:,}" if best.get("step") is not None else ""
    return f"the best plan found{when} has a predicted gain of {best['predicted_gain']:.1%}, not enough to move"


def verdict(record: RunRecord) -> list[str]:
    """Returns about three sentences."""
    sentences = [f"Autoshard: {autoshard_in_one_line(record)}."] if record.decisions else []
    if record.intervals and record.last.world_size > 1:
        sentences += [*filter(None, [describe_straggler(record.reported)]), *left_to_save(record)]
        balance = record.balance(record.reported)
        if not record.decisions and balance is not None and balance.low > 0 and balance.gain >= _WORTH_SAYING:
            sentences.append("Resharding was off (autoshard.enabled, autoshard.reshard).")
            if record.config:
                sentences[-1] += " To see what another plan would gain: dlrm-autoshard explain RUN."
    return sentences


def autoshard_in_one_line(record: RunRecord) -> str:
    """Sums up moves and their gains. Speed before and after is left out, since it changes for other reasons too."""
    done = Counter(str(decision.get("action")) for decision in record.decisions)
    moves = [decision for decision in record.decisions if decision.get("action") == "moved"]
    others = [
        f"{done[action]} {words}"
        for action, words in (("rolled_back", "undone"), ("refused", "refused for lack of memory"))
        if done[action]
    ]
    if not moves:
        kept = f"no move in {count(len(record.decisions), 'decision')}"
        return ", ".join([kept, *others]) + f" ({last_reason(record.decisions)})"
    parts = [count(len(moves), "move"), *others]
    if len(moves) == 1 and (which := moves_in_words(moves[0])):
        parts[0] += f" ({which})"
    actions = [decision.get("action") for decision in record.decisions]
    if "rolled_back" in actions and actions[::-1].index("rolled_back") < actions[::-1].index("moved"):
        return ", ".join([*parts, "including the last one"])
    stayed = moves_that_stayed(record)
    gains = _gains_in_words(stayed)
    paid = [move["paid_back_after_steps"] for move in stayed if move.get("paid_back_after_steps") is not None]
    if paid:
        gains += f", paid back after {' and '.join(f'{steps:,}' for steps in paid[:4])} steps"
    return f"{', '.join(parts)}: {gains}"


def moves_that_stayed(record: RunRecord) -> list[Mapping[str, Any]]:
    """Returns the decisions that moved tables and were not undone."""
    actions = [decision.get("action") for decision in record.decisions]
    following = itertools.pairwise([*actions, None])
    decided = zip(record.decisions, following, strict=True)
    return [decision for decision, pair in decided if pair[0] == "moved" and pair[1] != "rolled_back"]


def left_to_save(record: RunRecord, profile: IntervalProfile | None = None) -> list[str]:
    """States what perfect balance would have saved in an interval (by default the reported one)."""
    profile = profile or record.reported
    balance = record.balance(profile)
    return [] if balance is None else [balance.sentence(record.span(profile), profile.samples)]


def _gains_in_words(moves: Sequence[Mapping[str, Any]], most: int = 3) -> str:
    """States what moves saved, and why the gain of the last of the others is unknown."""
    known = [worth for move in moves if (worth := worth_in_words(move))]
    parts = []
    if known:
        more = f" and {len(known) - most} more" if len(known) > most else ""
        parts.append(f"saved {' and '.join(known[:most])}{more} of a step")
    unknown = [move for move in moves if worth_in_words(move) is None]
    if unknown:
        doubt = unknown[-1].get("doubt") or "no interval after it"
        which = "gain" if len(moves) == 1 else f"gain of {len(unknown)} of them"
        parts.append(f"{which} unknown ({doubt})")
    return "; ".join(parts)


def last_reason(decisions: tuple[Mapping[str, Any], ...]) -> str:
    """Returns why and when tables stayed: the last reason that concerns the plan, not the end of the run."""
    reasons = [(d.get("step"), str(d.get("text") or d.get("action")).removeprefix("kept: ")) for d in decisions]
    silent = ("no steps are left", "nothing has changed since", "looks have taken their share")
    step, reason = next((found for found in reversed(reasons) if not found[1].startswith(silent)), reasons[-1])
    return reason if step is None else f"at step {step:,}: {reason}"
