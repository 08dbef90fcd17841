"""The rule by which the loop moves tables."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_autoshard.autoshard.payoff import (
    MoveCost,
    Offer,
    Terms,
    caution_after,
    is_worse,
    measured_gain,
    moving,
    saving,
    should_reshard,
)

COST = MoveCost(bytes_per_second=1e9, fixed_seconds=0.1)
OFFER = Offer(predicted_gain=0.148, step_ms=20.0, remaining_steps=1000, tables=7, bytes_to_move=412 << 20)
TERMS = Terms(min_gain=0.02, noise=0.01)

offers = st.builds(
    Offer,
    predicted_gain=st.floats(-1, 0.9),
    step_ms=st.floats(0.1, 1000),
    remaining_steps=st.integers(0, 10**6),
    tables=st.integers(0, 100),
    bytes_to_move=st.integers(0, 2**40),
    parts=st.integers(1, 9),
)
terms = st.builds(
    Terms,
    min_gain=st.floats(0, 0.2),
    noise=st.floats(0, 0.3),
    caution=st.floats(0, 0.2),
)
costs = st.builds(MoveCost, bytes_per_second=st.floats(1e6, 1e11), fixed_seconds=st.floats(0, 10))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "7 tables, 412 MiB, about 0.53 s: predicted -14.8%"),
        ({"predicted_gain": 0.012}, "best candidate 1.2% faster, below min_gain 2%"),
        ({"predicted_gain": -0.1}, "no candidate is faster than the current plan"),
        (
            {"remaining_steps": 100},
            "best candidate 14.8% faster, which saves 0.3 s in the 100 steps left; moving 412 MiB takes 0.53 s",
        ),
    ],
)
def test_says_why_in_plain_words(change: dict[str, float], text: str) -> None:
    assert should_reshard(dataclasses.replace(OFFER, **change), TERMS, COST).text == text  # type: ignore[arg-type]


def test_names_noise_and_caution() -> None:
    small = dataclasses.replace(OFFER, predicted_gain=0.03)
    unsure = should_reshard(small, Terms(0.02, noise=0.02), COST).text
    assert unsure == "best candidate 3% faster, give or take 2%: not surely above min_gain 2%"
    assert "after recent moves 6% are asked for" in should_reshard(small, Terms(0.02, caution=0.04), COST).text


@given(offers, terms, costs)
def test_goes_exactly_when_it_pays_and_is_sure(offer: Offer, term: Terms, cost: MoveCost) -> None:
    verdict = should_reshard(offer, term, cost)
    pays = offer.predicted_gain * offer.step_ms / 1000 * offer.remaining_steps > cost.seconds(
        offer.bytes_to_move, offer.parts
    )
    certain = offer.predicted_gain - term.noise
    sure = certain >= term.min_gain and certain >= term.min_gain + term.caution and offer.predicted_gain > 0
    assert verdict.go == (pays and sure and offer.tables > 0)
    assert verdict.text


@given(offers, terms, costs, st.floats(0, 0.5), st.integers(0, 1000), st.floats(0, 0.5))
def test_a_better_offer_is_never_refused_where_a_worse_one_is_taken(
    offer: Offer, term: Terms, cost: MoveCost, more_gain: float, more_steps: int, fewer: float
) -> None:
    better = dataclasses.replace(
        offer,
        predicted_gain=offer.predicted_gain + more_gain,
        remaining_steps=offer.remaining_steps + more_steps,
        bytes_to_move=int(offer.bytes_to_move * (1 - fewer)),
    )
    if should_reshard(offer, term, cost).go:
        assert should_reshard(better, term, cost).go


@given(st.floats(0.001, 0.1), st.lists(st.integers(0, 20), max_size=5), st.integers(0, 20))
def test_caution_grows_with_moves_and_fades_with_time(min_gain: float, moves: list[int], left: int) -> None:
    now = caution_after(min_gain, moves, left, rolled_back=False)
    assert now >= 0
    assert caution_after(min_gain, [ago + 1 for ago in moves], left + 1, rolled_back=False) <= now
    assert caution_after(min_gain, [0, *moves], left, rolled_back=False) > now
    assert caution_after(min_gain, moves, left, rolled_back=True) > now
    assert caution_after(min_gain, [9], 9, rolled_back=False) == 0


@given(st.floats(1e5, 1e10), st.floats(0.001, 2), st.lists(st.integers(0, 2**32), min_size=1, max_size=6))
def test_move_cost_learns_a_steady_truth(bandwidth: float, fixed: float, sizes: list[int]) -> None:
    truth, believed = MoveCost(bandwidth, fixed), MoveCost()
    for size in sizes:
        believed = believed.learned(size, truth.seconds(size))
        assert believed.bytes_per_second > 0 and believed.fixed_seconds > 0
    for size in sizes[-1:]:  # what was just seen is what is expected the next time, within a factor of 2
        assert truth.seconds(size) / 2.01 <= believed.seconds(size) <= truth.seconds(size) * 2.01 + 0.2


def test_measured_gain_is_a_part_of_the_step_time() -> None:
    assert measured_gain(100.0, 125.0) == pytest.approx(0.2)
    assert is_worse(100.0, 95.0, noise=0.02) and not is_worse(100.0, 99.0, noise=0.02)


def test_texts_read_as_in_the_records() -> None:
    assert moving(7, 412 << 20, 0.312) == "7 tables, 412 MiB, 0.31 s"
    assert saving(0.148, 0.139) == "predicted -14.8%, measured -13.9%"
    assert saving(-0.01) == "predicted +1.0%"
    assert moving(1, 2048, 0.1).startswith("1 table,")
