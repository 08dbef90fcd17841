"""A run's verdict: what autoshard did to its speed, who is slowest and why, what placement could save.

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
from dlrm_autoshard.records.diagnosis import who_is_slow
from dlrm_autoshard.records.interval import IntervalProfile
from dlrm_autoshard.records.run import RunRecord

_WORTH_SAYING = 0.01
"""Part of a step: less is no reason to change a config."""
_NOT_BY_LOAD = {"starved of CPU": "other work on its core", "slow data": "its data loader"}


def bottom_line(record: RunRecord) -> str:
    """Whether the placement can be improved, in one sentence; "" where there are no costs."""
    if not record.intervals:
        return ""
    profile, balance = record.reported, record.balance(record.reported)
    if profile.world_size == 1:
        return "One rank has all tables: there is nothing to place."
    straggler = profile.straggler
    if straggler is not None and straggler.cause != "load":
        return f"Rank {straggler.rank} is held up by {_NOT_BY_LOAD[straggler.cause]}: no plan changes that."
    if balance is None or not math.isfinite(balance.low):
        return "Too few steps were sampled to judge the placement."
    if balance.low <= 0 or balance.gain < _WORTH_SAYING:
        most = f"perfect balance would save at most {max(0.0, balance.high):.1%} of a step"
        return f"No other plan would surely be faster: {most}."
    why = why_tables_stay(record.decisions) if record.decisions else "tables may not move"
    return f"Perfect balance would save {balance.gain:.1%} of a step; {why}."


def why_tables_stay(decisions: Sequence[Mapping[str, Any]]) -> str:
    """Says what the last search since the last move found."""
    since = itertools.takewhile(lambda decision: decision.get("action") != "moved", reversed(decisions))
    best = next((decision for decision in since if (decision.get("predicted_gain") or 0.0) > 0), None)
    if best is None:
        return "no other plan has been found that surely saves part of it"
    when = f" at step {best['step']:,}" if best.get("step") is not None else ""
    return f"the best plan found{when} saves a predicted {best['predicted_gain']:.1%}, not surely worth a move"


def verdict(record: RunRecord) -> list[str]:
    """Three sentences or so."""
    said = [f"Autoshard: {autoshard_in_one_line(record)}."] if record.decisions else []
    if record.intervals and record.last.world_size > 1:
        said += [*filter(None, [who_is_slow(record.reported)]), *left_to_save(record)]
        balance = record.balance(record.reported)
        if not record.decisions and balance is not None and balance.low > 0 and balance.gain >= _WORTH_SAYING:
            said.append("Tables stayed where they were put at the start (autoshard.enabled, autoshard.reshard).")
            if record.config:
                said[-1] += " What another plan would gain: dlrm-autoshard explain RUN."
    return said


def autoshard_in_one_line(record: RunRecord) -> str:
    """Sums up resharding and the worth of each move, never the speed before and after, which has other causes."""
    done = Counter(str(decision.get("action")) for decision in record.decisions)
    moves = [decision for decision in record.decisions if decision.get("action") == "moved"]
    others = [
        f"{done[action]} {words}"
        for action, words in (("rolled_back", "taken back"), ("refused", "refused for want of memory"))
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
        return ", ".join([*parts, "the last move among them"])
    stayed = moves_that_stayed(record)
    told = _worth_told(stayed)
    paid = [move["paid_back_after_steps"] for move in stayed if move.get("paid_back_after_steps") is not None]
    if paid:
        told += f", paid back after {' and '.join(f'{steps:,}' for steps in paid[:4])} steps"
    return f"{', '.join(parts)}: {told}"


def moves_that_stayed(record: RunRecord) -> list[Mapping[str, Any]]:
    """Decisions that moved tables and were not taken back."""
    actions = [decision.get("action") for decision in record.decisions]
    following = itertools.pairwise([*actions, None])
    decided = zip(record.decisions, following, strict=True)
    return [decision for decision, pair in decided if pair[0] == "moved" and pair[1] != "rolled_back"]


def left_to_save(record: RunRecord, profile: IntervalProfile | None = None) -> list[str]:
    """Says what perfect balance would have saved in an interval (by default the last one)."""
    profile = profile or record.reported
    balance = record.balance(profile)
    return [] if balance is None else [balance.sentence(record.span(profile), profile.samples)]


def _worth_told(moves: Sequence[Mapping[str, Any]], most: int = 3) -> str:
    """Says what moves saved, as far as it is known, and why it is not known of the last of the others."""
    known = [worth for move in moves if (worth := worth_in_words(move))]
    said = []
    if known:
        more = f" and {len(known) - most} more" if len(known) > most else ""
        said.append(f"saved {' and '.join(known[:most])}{more} of a step")
    unknown = [move for move in moves if worth_in_words(move) is None]
    if unknown:
        doubt = unknown[-1].get("doubt") or "no interval followed"
        which = "what it saved" if len(moves) == 1 else f"what {len(unknown)} of them saved"
        said.append(f"{which} is not known ({doubt})")
    return "; ".join(said)


def last_reason(decisions: tuple[Mapping[str, Any], ...]) -> str:
    """Returns why tables stayed, and when: the last reason that concerns the plan, not the run's end."""
    reasons = [(d.get("step"), str(d.get("text") or d.get("action")).removeprefix("kept: ")) for d in decisions]
    silent = ("no steps are left", "nothing has changed since", "looks have taken their share")
    step, reason = next((found for found in reversed(reasons) if not found[1].startswith(silent)), reasons[-1])
    return reason if step is None else f"at step {step:,}: {reason}"
