"""What a move was worth: the same steps' cost under both plans, whatever else became faster or slower meanwhile."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dlrm_autoshard.records.move_worth import TimedSteps, shift, worth_of

DENSE_MS = 10.0


def steps(
    cost_ms: float, *, count: int = 8, rest_ms: float = DENSE_MS, noise: float = 0.03, seed: int = 0, core: float = 1.0
) -> TimedSteps:
    drawn = cost_ms * np.exp(noise * np.random.default_rng(seed).standard_normal(count))
    return TimedSteps(tuple(drawn.tolist()), cost_ms + rest_ms, 18.0, (core,) * count, (60.0, 3.0))


def test_a_recovery_that_came_by_itself_is_not_credited_to_the_move() -> None:
    """Steps take half as long as before the move, all of it in what no plan decides."""
    worth = worth_of(steps(10, rest_ms=40, seed=1), steps(10, rest_ms=15, seed=2), predicted=(0.0, 0.02))
    assert worth.low < 0 < worth.high and abs(worth.gain) < 0.02 and not worth.doubt


def test_a_move_that_saves_a_fifth_is_worth_a_fifth_also_where_the_rest_became_faster_or_slower() -> None:
    for rest_before, seed in [(10.0, 1), (40.0, 2), (5.0, 3)]:
        before, after = steps(15, rest_ms=rest_before, seed=seed), steps(10, seed=seed + 10)
        worth = worth_of(before, after, predicted=(0.18, 0.02), scatter=0.01)
        assert worth.low < 0.2 < worth.high and worth.gain == pytest.approx(0.2, abs=0.02) and not worth.doubt
        assert worth.high - worth.low < 0.1
        assert worth.saved_ms(after.step_ms) == pytest.approx(5.0, rel=0.15)


def test_where_the_data_changed_the_old_plan_costs_what_all_that_was_learned_says() -> None:
    before, after = steps(30), TimedSteps(steps(10).cost_ms, 20.0, 18.0, (), (3.0, 60.0))
    assert not before.alike(after) and before.alike(steps(10))
    assert not before.alike(replace(before, work_ms=40.0)), "where all ranks have become slower"
    worth = worth_of(before, after, predicted=(0.2, 0.02), instead=(1.5, 0.05))
    assert worth.gain == pytest.approx(5 / 25, abs=0.01) and not worth.doubt
    unsure = worth_of(before, after, predicted=(0.2, 0.02), instead=(1.5, 0.2))
    assert unsure.high - unsure.low > 3 * (worth.high - worth.low)


def test_a_number_is_in_doubt_where_it_is_not_what_was_predicted_or_steps_do_not_compare() -> None:
    foreseen = (0.2, 0.01)
    assert "but predicted 20.0%, give or take 1.6%" in worth_of(steps(10), steps(10), predicted=foreseen).doubt
    assert not worth_of(steps(10), steps(10), predicted=(0.2, 0.2)).doubt, "within both intervals"
    shared = worth_of(steps(15), steps(10, core=0.6), predicted=foreseen)
    assert shared.incomparable == "in the 16 sampled steps compared a rank got only 60% of its CPU core"
    assert "2 before the move and 8 after" in worth_of(steps(15, count=2), steps(10), predicted=foreseen).incomparable


def test_steps_in_which_other_work_had_a_core_are_left_out_where_enough_are_left() -> None:
    calm, disturbed = steps(15, count=5), steps(40, count=9, core=0.5)
    worth = worth_of(disturbed.after(calm), steps(10), predicted=(0.2, 0.02))
    assert worth.gain == pytest.approx(0.2, abs=0.03) and not worth.doubt
    few = worth_of(disturbed.after(steps(15, count=2)), steps(10), predicted=(0.2, 0.02))
    assert few.incomparable.startswith("in the 19 sampled steps compared a rank got only 59%")


@pytest.mark.parametrize("count", [3, 4, 12])
def test_the_interval_holds_the_true_difference_nine_times_of_ten_whatever_the_noise(count: int) -> None:
    """Heavy tails, as where other work takes the core for a while."""
    draw, inside, jobs = np.random.default_rng(count), 0, 400
    for _ in range(jobs):
        before, after = (ms + np.abs(draw.standard_t(2, 10)) for ms in (15.0, 12.0))
        _, low, high = shift(before[:count], after)
        inside += low <= 3.0 <= high
    assert 0.85 < inside / jobs < 0.98


def test_timed_steps_are_added_up_and_come_back_from_a_checkpoint() -> None:
    one = TimedSteps((1.0, 2.0), 10.0, 3.0, (0.8, 0.9), (1.0,))
    both = TimedSteps((3.0, 4.0), 20.0, 5.0, (1.0, 0.7), (2.0,)).after(one)
    assert both == TimedSteps((1.0, 2.0, 3.0, 4.0), 15.0, 4.0, (0.8, 0.9, 1.0, 0.7), (2.0,))
    assert TimedSteps.from_json(json.loads(json.dumps(both.to_json()))) == both
    assert len(steps(1, count=150).after(steps(1, count=150)).cost_ms) == 200
