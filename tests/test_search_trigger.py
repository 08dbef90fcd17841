"""When resharding searches, and how far intervals scatter: simulated figures, pure arithmetic."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.decision import Interval, error_of_median
from dlrm_autoshard.autoshard.search_trigger import SearchTrigger
from dlrm_autoshard.costs import RankCost, StepProfile, balanced_cost_ms
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig, TableStats

PLAN = ShardingPlan({"a": 0, "b": 1}, 2)


def interval(first: float, second: float, step: int = 100, left: int = 10_000, dense: float = 5.0) -> Interval:
    """Two ranks that look up for so many ms, and a step that takes the slower one's and `dense` ms."""
    ranks = (RankCost(fwd_compute_ms=first), RankCost(fwd_compute_ms=second))
    tables, stats = (TableConfig("a", 10, 4), TableConfig("b", 10, 4)), (TableStats(1.0), TableStats(1.0))
    profile = StepProfile(PLAN, tables, stats, 64, ranks, "simulated")
    return Interval(0, step, profile, 64_000 / (max(first, second) + dense), left)


def test_what_slows_all_ranks_is_no_scatter_of_gains() -> None:
    trigger = SearchTrigger(0.02)
    for factor in (1.0, 1.03, 1.0, 1.03):
        trigger.see(interval(20 * factor, 20 * factor), [1.0, 1.0])
    assert trigger.gain_scatter <= 0.005


def test_gains_grow_surer_with_intervals_alike_and_unsure_after_a_change() -> None:
    trigger = SearchTrigger(0.02)
    for number in range(6):
        trigger.see(interval(20, 20 + (number % 2)), [1.0, 1.0])
    several = trigger.gain_scatter
    trigger.see(interval(20, 40), [1.0, 1.0])
    assert trigger.gain_scatter > 1.5 * several


def timed(first_S: list[float], second_S: list[float]) -> Interval:
    """Two ranks whose lookups were timed in so many steps; the interval's figures are their means."""
    steps_SW4 = np.zeros((len(first_S), 2, 4))
    steps_SW4[:, 0, 0], steps_SW4[:, 1, 0] = first_S, second_S
    one = interval(float(np.mean(first_S)), float(np.mean(second_S)))
    return replace(one, samples=len(first_S), timed_SW4=steps_SW4)


@given(st.lists(st.floats(0.7, 1.5), min_size=8, max_size=40), st.floats(1.2, 2.0))
def test_moments_in_which_the_whole_machine_is_slow_leave_balance_as_sure_as_it_is(
    slow_S: list[float], ratio: float
) -> None:
    trigger = SearchTrigger(0.02)
    trigger.see(timed([10 * slow for slow in slow_S], [10 * ratio * slow for slow in slow_S]), [1.0, 1.0])
    # What balance would save of a step scatters no more than the step does: a part of it.
    spread = (max(slow_S) - min(slow_S)) / float(np.mean(slow_S))
    assert trigger.gain_scatter <= max(thresholds.USUAL_SCATTER, trigger.balance_gain * spread / len(slow_S) ** 0.5)


def test_a_gain_is_the_surer_the_more_steps_were_timed_and_the_less_ranks_differ_from_step_to_step() -> None:
    def scatter(steps: int, noise: float) -> float:
        draw = np.random.default_rng(0)
        first_S, second_S = (base * np.exp(noise * draw.standard_normal(steps)) for base in (10, 20))
        trigger = SearchTrigger(0.02)
        trigger.see(timed(first_S.tolist(), second_S.tolist()), [1.0, 1.0])
        return trigger.gain_scatter

    assert scatter(10, 0.5) > 2 * scatter(160, 0.5) > 0
    assert scatter(10, 0.5) > 2 * scatter(10, 0.1)


def test_a_slow_drift_is_searched_for_anew_by_what_was_learned_of_it() -> None:
    """Intervals differ by more than the drift does from one to the next; the posterior follows it."""
    trigger = SearchTrigger(0.01)

    def seen(second_ms: float) -> None:
        learned = (RankCost(fwd_compute_ms=20.0), RankCost(fwd_compute_ms=second_ms))
        trigger.see(interval(20, 24), [1.0, 1.0], learned)

    seen(21.0)
    while trigger.reason_not_to_search() is None:
        trigger.searched(1.0)
        trigger.found_nothing("best candidate saves 0.2%", 0.002)
        seen(21.05)
    for second_ms in (21.1, 21.2):
        seen(second_ms)
        assert trigger.reason_not_to_search() == "nothing has changed (best candidate saves 0.2%)"
    seen(21.6)
    assert trigger.reason_not_to_search() is None


def test_a_typical_step_is_surer_than_a_single_one() -> None:
    draws = np.random.default_rng(0).standard_normal((4000, 25))
    assert error_of_median(1) == 1.0
    assert error_of_median(25) == pytest.approx(np.median(draws, axis=1).std(), rel=0.05)


def test_perfect_balance_gives_a_slow_rank_less_to_do() -> None:
    ranks = (RankCost(fwd_compute_ms=10), RankCost(fwd_compute_ms=20))
    assert balanced_cost_ms(ranks) == 15
    assert balanced_cost_ms(ranks, [1.0, 2.0]) == pytest.approx(20 / 1.5)


def test_it_stops_searching_where_nothing_is_found_and_searches_again_when_something_changes() -> None:
    trigger, searches = SearchTrigger(0.02), 0
    trigger.see(interval(20, 30), [1.0, 1.0])
    allowed = trigger.search_seconds
    while (reason := trigger.reason_not_to_search()) is None:
        searches += 1
        trigger.searched(allowed / 2.5)
        trigger.found_nothing("best candidate 1% faster")
        trigger.see(interval(20, 30), [1.0, 1.0])
    assert searches == 3 and reason == "nothing has changed (best candidate 1% faster)"
    trigger.see(interval(20, 45), [1.0, 1.0])
    assert trigger.reason_not_to_search() is None


def test_a_change_that_was_noticed_is_searched_for_once_though_its_few_noisy_steps_are_sure_of_nothing() -> None:
    def noisy(second: float, since: int | None) -> Interval:
        one = interval(20, second)
        return replace(one, profile=replace(one.profile, noise=0.5), changed_steps=since, early=since is not None)

    trigger = SearchTrigger(0.02)
    trigger.see(noisy(24, None), [1.0, 1.0])
    trigger.searched(3600.0)
    trigger.found_nothing("nothing")
    trigger.see(noisy(24, None), [1.0, 1.0])
    scatter = trigger.gain_scatter
    assert trigger.reason_not_to_search() == "nothing has changed (nothing)"
    trigger.see(noisy(26, since=20), [1.0, 1.0])
    assert trigger.reason_not_to_search() is None
    assert trigger.gain_scatter <= scatter * 2**0.5  # that they differ is no scatter
    trigger.searched(3600.0)
    trigger.found_nothing("nothing")
    trigger.see(noisy(26, since=40), [1.0, 1.0])
    assert trigger.reason_not_to_search() == "nothing has changed (nothing)"
    trigger.see(noisy(26, since=10), [1.0, 1.0])  # another one
    assert trigger.reason_not_to_search() is None


def looks_of(trigger: SearchTrigger, steps: range, seconds: float, second_ms: float = 21.0) -> list[int]:
    """After which of these steps it learns and decides, where that takes so long."""
    found = []
    for step in steps:
        now = interval(20, second_ms, step)
        if trigger.reason_not_to_look(now) is None:
            trigger.see(now, [1.0, 1.0])
            trigger.looked(seconds)
            found.append(step)
    return found


def test_looks_are_the_rarer_the_longer_nothing_changes_and_come_at_once_when_something_does() -> None:
    trigger = SearchTrigger(0.01)
    calm = looks_of(trigger, range(100, 3201, 100), seconds=0.02)
    apart = np.diff(calm)
    assert calm[:2] == [100, 200] and 8 <= len(calm) <= 16 and max(apart) <= 600
    assert (np.diff(apart) >= -100).all() and apart[-3:].mean() > 2 * apart[:3].mean()
    said = trigger.reason_not_to_look(interval(20, 21, calm[-1] + 100))
    assert said == f"nothing has changed since step {calm[-1]:,}"
    assert looks_of(trigger, range(3300, 3601, 100), 0.02, second_ms=30.0)[:2] == [3300, 3400]


@given(st.floats(0, 1e4), st.integers(1, 10**6), st.integers(0, 10**6), st.floats(1, 40))
def test_it_looks_where_something_changed_whatever_that_takes(
    seconds: float, apart: int, left: int, second_ms: float
) -> None:
    trigger = SearchTrigger(0.01)
    looks_of(trigger, range(100, 1000, 100), seconds)
    noticed = replace(interval(20, 21, 900 + apart, left), changed_steps=5)
    assert trigger.reason_not_to_look(noticed) is None
    if abs(second_ms - 21) > 5:
        assert trigger.reason_not_to_look(interval(20, second_ms, 900 + apart, left)) is None


def test_it_does_not_search_where_balance_would_save_little_or_no_steps_are_left() -> None:
    trigger = SearchTrigger(0.02)
    trigger.see(interval(20, 20.2), [1.0, 1.0])
    assert "even perfect balance would save" in (trigger.reason_not_to_search() or "")
    trigger.see(interval(20, 30, left=2), [1.0, 1.0])
    assert "in the 2 steps left" in (trigger.reason_not_to_search() or "")
    trigger.see(interval(20, 30, left=0), [1.0, 1.0])
    assert trigger.reason_not_to_search() == "no steps are left"


def test_resharding_decides_by_twelve_hand_set_numbers_at_most_and_each_says_what_it_is() -> None:
    body = ast.parse(Path(thresholds.__file__).read_text()).body[1:]
    numbers, said = body[::2], body[1::2]
    names = [name for node in numbers for name in ast.walk(node) if isinstance(name, ast.Name)]
    assert all(isinstance(node, ast.Assign) for node in numbers) and len(names) <= 12
    assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in said)
    assert len(said) == len(numbers)
