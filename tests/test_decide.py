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


def horizon(steps: int = 10_000, surely: float = 0.0) -> Horizon:
    return Horizon(20.0, steps, min_gain=0.01, surely=surely)


@pytest.mark.parametrize(
    "options, when, goes, said",
    [
        ([option(0.1)], horizon(), "other", ""),
        ([option(0.1), option(0.12, plan="left")], horizon(), "left", ""),  # the better one
        ([option(0.009)], horizon(), None, "best candidate saves 0.9%, below min_gain 1%"),
        ([option(0.03, 0.03)], horizon(), None, "give or take 4.8%: not surely a gain"),
        ([option(0.03, 0.015)], horizon(), "other", ""),
        ([option(0.03, 0.015)], horizon(surely=0.01), None, "after recent moves it must surely save 1%"),
        ([option(0.05, 0.015)], horizon(surely=0.01), "other", ""),
        ([option(-0.1)], horizon(), None, "no candidate is faster than the current plan"),
        ([option(0.05)], horizon(100), None, "0.1 s in the 100 steps left; moving 95.4 MiB takes 0.2 s"),
    ],
)
def test_what_is_done_and_what_is_said(options: list[Option], when: Horizon, goes: str | None, said: str) -> None:
    choice = decide(options, COST, when)
    assert (choice.option and choice.option.plan) == (PLANS[goes] if goes else None)
    assert said in choice.why and bool(choice.why) == (goes is None)


@given(st.floats(-0.1, 0.3), st.floats(0.001, 0.1), st.integers(1, 10**10), st.integers(1, 10**5))
def test_it_goes_exactly_where_it_pays_and_is_sure(gain: float, spread: float, size: int, steps: int) -> None:
    one, when = option(gain, spread, num_bytes=size), horizon(steps)
    pays = one.gain * 0.02 * steps > COST.seconds(size)
    assert (decide([one], COST, when).option is not None) == (one.gain >= 0.01 and one.surely > 0 and pays)
    assert float((one.saved_D >= one.surely).mean()) == pytest.approx(thresholds.SURE, abs=0.001)


@given(st.floats(0.0, 0.3), st.floats(0.001, 0.05), st.floats(0.0, 0.1))
def test_a_better_option_is_never_refused_where_a_worse_one_is_taken(gain: float, spread: float, more: float) -> None:
    worse, better = option(gain, spread), option(gain + more, spread)
    if decide([worse], COST, horizon()).option is not None:
        assert decide([better], COST, horizon()).option is not None


@given(st.floats(1e8, 1e10), st.floats(0.01, 1.0), st.lists(st.integers(10**5, 10**10), min_size=30, max_size=40))
def test_move_cost_learns_a_steady_truth(bandwidth: float, fixed: float, sizes: list[int]) -> None:
    cost = MoveCost()
    for size in [10**5, 10**10, *sizes, 10**5, 10**10]:
        cost = cost.learned(size, fixed + size / bandwidth)
    for size in (10**5, 10**10):
        assert cost.seconds(size) == pytest.approx(fixed + size / bandwidth, rel=1.0)


@pytest.mark.parametrize(
    "history, balance, when, why",
    [
        (History(), 0.05, horizon(), ""),
        (History(), 0.009, horizon(), "even perfect balance would save 0.9%, below min_gain 1%"),
        (History(), 0.05, horizon(0), "no steps are left"),
        (History(), 0.05, horizon(10), "at most 0.01 s to gain in the 10 steps left"),
        (History(out_of_reach=0.048), 0.05, horizon(), "would save 5%, about what the last search found no plan"),
        (History(out_of_reach=0.048), 0.07, horizon(), ""),  # a slow drift
        (History(look_seconds=0.3), 0.05, horizon(1000), "at most 1 s to gain, and a search takes 0.3 s"),
        (History(look_seconds=0.04), 0.05, horizon(1000), ""),
        (History(look_seconds=0.11), 0.076, horizon(500), "at most 0.76 s to gain, and a search takes 0.11 s"),
    ],
)
def test_a_look_is_made_where_it_may_gain_much_more_than_it_takes(
    history: History, balance: float, when: Horizon, why: str
) -> None:
    said = history.why_not_look(balance, when)
    assert why in said and bool(said) == bool(why)


def test_only_a_whole_interval_puts_anything_out_of_reach() -> None:
    """The first steps of a change tell so little of its tables that nothing may be found, and much a little later."""
    history = History()
    history.looked(0.1, 0.3, 0.0, early=True)
    assert history.why_not_look(0.3, horizon()) == ""
    history.looked(0.1, 0.3, 0.1, early=False)
    assert history.out_of_reach == pytest.approx(0.2)


def test_a_slow_drift_brings_within_reach_what_was_not() -> None:
    """Each interval drifts too little to be noticed, and what balance would save may even fall meanwhile."""
    history, lookups = History(), [1.0] * 10
    history.looked(0.1, 0.3, 0.0, lookups, early=False)
    for shifted, why in ((0.05, "no plan for"), (0.09, "no plan for"), (0.11, "")):
        history.changed([1 + shifted, 1 - shifted] * 5, noticed=False)
        said = history.why_not_look(0.2, horizon())
        assert why in said and bool(said) == bool(why)


@given(st.lists(st.floats(0.01, 0.08), min_size=200, max_size=200, unique=True), st.floats(0.0, 60.0))
def test_where_nothing_changes_looks_become_ever_rarer_and_take_half_a_percent_of_the_job(
    balances: list[float], seconds: float
) -> None:
    """However long each takes after the first, whose search is cut short: each needs a record, by min_gain at that, and
    may take a share of what is new in it."""
    history, when, looks = History(), horizon(), list[float]()
    for balance in balances:
        if not history.why_not_look(balance, when):
            looks.append(seconds if looks else history.search_seconds(balance, when))
            history.looked(seconds, balance, 0.0, early=False)
    assert len(looks) <= 1 + 0.08 / 0.01
    assert sum(looks) <= 0.005 * when.steps * when.step_ms / 1000


def test_after_a_move_the_next_must_surely_save_min_gain() -> None:
    """Also one back, so that noise moves no table to and fro."""
    history = History(intervals=10)
    assert history.must_surely_save(0.01) == 0.0
    history.moved_at = 10
    assert history.must_surely_save(0.01) == 0.01
    history.intervals += thresholds.MEMORY + 1
    assert history.must_surely_save(0.01) == 0.0


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
