"""When a move pays: a table of situations and what is done in them, and what holds in all of them."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.decide import History, Horizon, MoveCost, Option, decide
from dlrm_autoshard.autoshard.decision import Decision
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.decisions import moves_in_words

PLANS = {name: ShardingPlan({"a": i, "b": 1}, 4) for i, name in enumerate(("live", "other", "left"))}
DRAWS = np.random.default_rng(0).standard_normal(2000)
DRAWS -= DRAWS.mean()
COST = MoveCost(bytes_per_second=1e9, fixed_seconds=0.1)


def option(gain: float, uncertainty: float = 0.01, plan: str = "other", num_bytes: int = 10**8) -> Option:
    return Option(PLANS[plan], gain + uncertainty * DRAWS, 1, num_bytes)


def horizon(steps: int = 10_000, remaining: int | None = None) -> Horizon:
    return Horizon(20.0, steps, steps if remaining is None else remaining, min_gain=0.01)


def after_a_move(intervals_ago: int = 1) -> History:
    history = History(intervals=10 - intervals_ago)
    history.moved(PLANS["left"])
    history.intervals = 10
    return history


@pytest.mark.parametrize(
    "history, options, when, moves_since, goes, said",
    [
        (History(), [option(0.1)], horizon(), 0, "other", ""),
        (History(), [option(0.1), option(0.12, plan="left")], horizon(), 0, "left", ""),  # the better one
        (History(), [option(0.009)], horizon(), 0, None, "best candidate saves 0.9%, below min_gain 1%"),
        (History(), [option(0.03, 0.03)], horizon(), 0, None, "give or take 4.8%: not surely a gain"),
        (History(), [option(0.03, 0.015)], horizon(), 0, "other", ""),
        (History(), [option(-0.1)], horizon(), 0, None, "no candidate is faster than the current plan"),
        (History(), [option(0.05)], horizon(100), 0, None, "0.1 s in the 100 steps left; moving 95.4 MiB takes 0.2 s"),
        (History(), [option(0.05)], horizon(100, 5000), 0, None, "for which so new a change may be expected to last"),
        # After a move the next must surely save min_gain, also one back; not where it is for the same change.
        (after_a_move(), [option(0.03, 0.015)], horizon(), 0, None, "after recent moves it must surely save 1%"),
        (after_a_move(), [option(0.05, 0.015)], horizon(), 0, "other", ""),
        (after_a_move(), [option(0.03, 0.015)], horizon(), 1, "other", ""),
        (after_a_move(), [option(0.03, 0.015, "left")], horizon(), 1, None, "it must surely save 1%"),
        (after_a_move(), [option(0.2, 0.02, "left")], horizon(), 0, "left", ""),  # a mistake is taken back
        (after_a_move(7), [option(0.03, 0.015)], horizon(), 0, "other", ""),  # long ago
    ],
)
def test_what_is_done_and_what_is_said(
    history: History, options: list[Option], when: Horizon, moves_since: int, goes: str | None, said: str
) -> None:
    choice = decide(history, options, COST, when, moves_since)
    assert (choice.option and choice.option.plan) == (PLANS[goes] if goes else None)
    assert said in choice.why and bool(choice.why) == (goes is None)


@given(st.floats(-0.1, 0.3), st.floats(0.001, 0.1), st.integers(1, 10**10), st.integers(1, 10**5))
def test_it_goes_exactly_where_it_pays_and_is_sure(gain: float, spread: float, size: int, steps: int) -> None:
    one, when = option(gain, spread, num_bytes=size), horizon(steps)
    pays = one.gain * 0.02 * steps > COST.seconds(size)
    sure = float((one.saved_D > 0).mean()) >= thresholds.SURE
    assert (decide(History(), [one], COST, when).option is not None) == (one.gain >= 0.01 and sure and pays)


@given(st.floats(0.0, 0.3), st.floats(0.001, 0.05), st.floats(0.0, 0.1))
def test_a_better_option_is_never_refused_where_a_worse_one_is_taken(gain: float, spread: float, more: float) -> None:
    worse, better = option(gain, spread), option(gain + more, spread)
    if decide(after_a_move(), [worse], COST, horizon()).option is not None:
        assert decide(after_a_move(), [better], COST, horizon()).option is not None


@given(st.floats(1e8, 1e10), st.floats(0.01, 1.0), st.lists(st.integers(10**5, 10**10), min_size=30, max_size=40))
def test_move_cost_learns_a_steady_truth(bandwidth: float, fixed: float, sizes: list[int]) -> None:
    cost = MoveCost()
    for size in [10**5, 10**10, *sizes, 10**5, 10**10]:
        cost = cost.learned(size, fixed + size / bandwidth)
    for size in (10**5, 10**10):
        assert cost.seconds(size) == pytest.approx(fixed + size / bandwidth, rel=1.0)


@pytest.mark.parametrize(
    "history, balance, when, whole, why",
    [
        (History(), 0.05, horizon(), True, ""),
        (History(), 0.009, horizon(), True, "even perfect balance would save 0.9%, below min_gain 1%"),
        (History(), 0.05, horizon(0), True, "no steps are left"),
        (History(), 0.05, horizon(10), True, "at most 0.01 s to gain in the 10 steps left"),
        (History(out_of_reach=0.048), 0.05, horizon(), True, "would save 5%, about what the last search found no plan"),
        (History(out_of_reach=0.048), 0.07, horizon(), True, ""),  # a slow drift
        (History(look_seconds=0.3), 0.05, horizon(1000), True, "at most 1 s to gain, and a search takes 0.3 s"),
        (History(look_seconds=0.2), 0.05, horizon(1000), True, ""),
        # The first whole interval after a move says what that was worth, whatever a search takes.
        (History(look_seconds=9.0, out_of_reach=0.05, unjudged=True), 0.05, horizon(), True, ""),
        (History(look_seconds=9.0, out_of_reach=0.05, unjudged=True), 0.05, horizon(), False, "found no plan for"),
    ],
)
def test_a_look_is_made_where_it_may_gain_more_than_it_takes(
    history: History, balance: float, when: Horizon, whole: bool, why: str
) -> None:
    said = history.why_not_look(balance, when, whole=whole)
    assert why in said and bool(said) == bool(why)


def test_only_a_whole_interval_puts_anything_out_of_reach() -> None:
    """The first steps of a change tell so little of its tables that nothing may be found, and much a little later."""
    history = History(unjudged=True)
    history.looked(0.1, 0.3, 0.0, whole=False)
    assert history.why_not_look(0.3, horizon(), whole=False) == "" and history.unjudged
    history.looked(0.1, 0.3, 0.1)
    assert history.out_of_reach == pytest.approx(0.2) and not history.unjudged


@given(st.lists(st.floats(0.01, 0.1), min_size=200, max_size=200, unique=True))
def test_where_nothing_changes_looks_become_ever_rarer(balances: list[float]) -> None:
    """Each one needs a record, by min_gain at that."""
    history, looks = History(), 0
    for balance in balances:
        if not history.why_not_look(balance, horizon(), whole=True):
            history.looked(0.1, balance, 0.0)
            looks += 1
    assert looks <= 1 + 0.1 / 0.01


def test_a_plan_that_a_rank_had_no_memory_for_is_asked_for_again_later() -> None:
    history = History(intervals=3, refused_at={PLANS["other"].fingerprint: 3})
    assert history.refused_lately(PLANS["other"]) and not history.refused_lately(PLANS["left"])
    history.intervals = 3 + thresholds.MEMORY + 1
    assert not history.refused_lately(PLANS["other"])


def test_numbers_set_by_hand_lie_in_one_table_and_each_says_what_it_is() -> None:
    body = ast.parse(Path(thresholds.__file__).read_text()).body[1:]
    names = [
        name.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    ]
    assert len(names) <= 20
    for node, text in zip(body[::2], body[1::2], strict=True):
        assert isinstance(node, ast.Assign) and isinstance(text, ast.Expr)
    others = [path for path in Path(thresholds.__file__).parent.glob("*.py") if path.name != "thresholds.py"]
    for path in others:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                assert not isinstance(node.value.value, (int, float)), f"{path.name} sets a number of its own"


def test_a_decision_s_text_is_made_when_it_is_written() -> None:
    move = Decision(0, 10, "moved", predicted_gain=0.148, uncertainty=0.02, move_seconds=0.5)
    assert move.text == "moved 0 tables, 0 bytes, 0.50 s: predicted gain 14.8%"
    assert Decision(0, 10, "kept", why="no steps are left").text == "kept: no steps are left"


def test_a_decision_says_which_shards_went_from_where_to_where() -> None:
    moves = [{"shard": name, "from_rank": 1, "to_rank": 0, "bytes": 8} for name in ("ad", "user[0:32]")]
    assert moves_in_words({"moves": moves}) == "'ad', 'user[0:32]' from rank 1 to 0"
