"""The arithmetic by which tables move: does a move surely gain what is asked, and pay for itself."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.decision import Decision, Interval, Proposal, moving
from dlrm_autoshard.autoshard.payoff import MoveCost, caution_after, reason_to_stay, saved_on_average
from dlrm_autoshard.costs import RankCost, StepProfile
from dlrm_autoshard.plan import MoveRecord, ShardingPlan

PLAN = ShardingPlan({"a": 0}, 1)
MOVED = MoveRecord(shard="a", from_rank=0, to_rank=1, bytes=412 << 20)
COST = MoveCost(bytes_per_second=1e9, fixed_seconds=0.1)
PROPOSAL = Proposal(PLAN, gain=0.148, uncertainty=0.01, tables=7, bytes=412 << 20)


def interval(step_ms: float = 20.0, remaining_steps: int = 1000) -> Interval:
    profile = StepProfile(PLAN, (), (), 64, (RankCost(1.0),), "simulated")
    return Interval(0, 100, profile, 64_000 / step_ms, remaining_steps)


proposals = st.builds(
    Proposal,
    plan=st.just(PLAN),
    gain=st.floats(-1, 0.9),
    uncertainty=st.floats(0, 0.3),
    tables=st.integers(0, 100),
    bytes=st.integers(0, 2**40),
    parts=st.integers(1, 9),
)
intervals = st.builds(interval, st.floats(0.1, 1000), st.integers(0, 10**6))
asked = st.tuples(st.floats(0, 0.2), st.floats(0, 0.2))
costs = st.builds(MoveCost, bytes_per_second=st.floats(1e6, 1e11), fixed_seconds=st.floats(0, 10))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, None),
        ({"gain": 0.012}, "best candidate saves 1.2%, below min_gain 2%"),
        ({"gain": -0.1}, "no candidate is faster than the current plan"),
        (
            {"gain": 0.03, "uncertainty": 0.02},
            "best candidate saves 3%, give or take 3.3%: not surely a gain",
        ),
    ],
)
def test_says_why_in_plain_words(change: dict[str, float], text: str | None) -> None:
    assert reason_to_stay(dataclasses.replace(PROPOSAL, **change), interval(), COST, 0.02) == text  # type: ignore[arg-type]


def test_says_what_a_move_costs_and_what_caution_asks_for() -> None:
    assert reason_to_stay(PROPOSAL, interval(remaining_steps=100), COST, 0.02) == (
        "best candidate saves 14.8%: 0.3 s in the 100 steps left; moving 412 MiB takes 0.53 s"
    )
    new = dataclasses.replace(interval(), changed_steps=20)  # in 1000 steps it would pay
    assert reason_to_stay(PROPOSAL, interval(), COST, 0.02) is None
    assert "0.23 s in the 79 steps for which so new a change may be expected to last" in (
        reason_to_stay(PROPOSAL, new, COST, 0.02) or ""
    )
    assert reason_to_stay(PROPOSAL, dataclasses.replace(new, changed_steps=80), COST, 0.02) is None
    small = dataclasses.replace(PROPOSAL, gain=0.03, uncertainty=0.0)
    assert "after recent moves it must surely save 4%" in (reason_to_stay(small, interval(), COST, 0.02, 0.04) or "")


@given(proposals, intervals, asked, costs)
def test_goes_exactly_when_it_pays_and_is_sure(
    proposal: Proposal, measured: Interval, ask: tuple[float, float], cost: MoveCost
) -> None:
    min_gain, caution = ask
    reason = reason_to_stay(proposal, measured, cost, min_gain, caution)
    gained = proposal.gain * measured.step_ms / 1000 * measured.remaining_steps
    pays = gained - cost.seconds(proposal.bytes, proposal.parts) > 0
    certain = proposal.gain - thresholds.SURE * proposal.uncertainty
    sure = proposal.gain >= min_gain and certain >= caution and proposal.gain > 0
    assert (reason is None) == (pays and sure and proposal.tables > 0)
    assert reason != ""


@given(proposals, intervals, asked, costs, st.floats(0, 0.5), st.integers(0, 1000), st.floats(0, 0.5))
def test_a_better_proposal_is_never_refused_where_a_worse_one_is_taken(
    proposal: Proposal,
    measured: Interval,
    ask: tuple[float, float],
    cost: MoveCost,
    more_gain: float,
    more_steps: int,
    fewer: float,
) -> None:
    better = dataclasses.replace(
        proposal, gain=proposal.gain + more_gain, bytes=int(proposal.bytes * (1 - fewer)), uncertainty=0.0
    )
    longer = dataclasses.replace(measured, remaining_steps=measured.remaining_steps + more_steps)
    if reason_to_stay(proposal, measured, cost, *ask) is None:
        assert reason_to_stay(better, longer, cost, *ask) is None


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
    truth, learned = MoveCost(bandwidth, fixed), MoveCost()
    for size in sizes:
        learned = learned.learned(size, truth.seconds(size))
        assert learned.bytes_per_second > 0 and learned.fixed_seconds > 0
    for size in sizes[-1:]:  # what was just seen is what is expected the next time, within a factor of 2
        assert truth.seconds(size) / 2.01 <= learned.seconds(size) <= truth.seconds(size) * 2.01 + 0.2


def test_a_gain_has_to_be_sure_and_min_gain_to_be_expected() -> None:
    likely = dataclasses.replace(PROPOSAL, gain=0.05, uncertainty=0.02)
    assert reason_to_stay(likely, interval(), COST, 0.02) is None
    unsure, little = dataclasses.replace(likely, uncertainty=0.04), dataclasses.replace(likely, gain=0.015)
    assert "not surely a gain" in (reason_to_stay(unsure, interval(), COST, 0.02) or "")
    assert "below min_gain" in (reason_to_stay(little, interval(), COST, 0.02) or "")


@given(
    st.lists(st.floats(-0.2, 0.3), min_size=1, max_size=20),
    st.floats(0.0, 0.02),
    st.floats(0.0, 0.06),
    st.integers(1, 9),
)
def test_knowing_is_worth_what_the_moves_save_that_are_made_then(
    gains_D: list[float], scatter: float, min_gain: float, parts: int
) -> None:
    now = interval()
    known = [dataclasses.replace(PROPOSAL, gain=gain, uncertainty=scatter, parts=parts) for gain in gains_D]
    seconds, moving_seconds = now.step_ms / 1000 * now.remaining_steps, COST.seconds(PROPOSAL.bytes, parts)
    asked = max(min_gain, thresholds.SURE * scatter)
    saved = [max(0.0, gain * seconds - moving_seconds) * (gain >= asked and gain > 0) for gain in gains_D]
    assert saved_on_average(known, now, COST, min_gain) == pytest.approx(sum(saved) / len(saved))
    assert saved_on_average(known, now, COST, 0.31) == 0.0


def test_texts_read_as_in_the_records() -> None:
    assert moving(7, 412 << 20) == "7 tables, 412 MiB" and moving(1, 2048).startswith("1 table,")
    moved = Decision(0, 500, "moved", predicted_gain=0.148, moves=(MOVED,), move_seconds=0.312, new_plan=PLAN)
    assert moved.text == "moved 1 table, 412 MiB, 0.31 s: predicted gain 14.8%; 'a' from rank 0 to 1"
    judged = dataclasses.replace(moved, measured_gain=-0.021, measured_low=-0.04, measured_high=-0.0001)
    assert "gain 14.8%, measured -2.1% (-4.0 to 0.0%); 'a' from" in judged.text
    doubted = dataclasses.replace(judged, doubt="too few steps were sampled")
    assert "gain 14.8%, what it gained is not known: too few steps were sampled; 'a' from" in doubted.text
    assert Decision(0, 500, "kept", "no steps are left").text == "kept: no steps are left"


def test_a_decision_s_text_is_made_when_it_is_written() -> None:
    decision = Decision(3, 500, "refused", "rank 1 needs 6 GiB more", predicted_gain=0.1, uncertainty=0.02)
    record = decision.to_json()
    assert record["text"] == decision.text and record["action"] == "refused" and record["plan"] is None
    assert "why" not in record and "new_plan" not in record and record["uncertainty"] == 0.02
    assert Decision.from_state_dict(decision.state_dict()) == decision


def test_a_decision_says_which_shards_went_from_where_to_where() -> None:
    decision = Decision(3, 500, "moved", moves=(MOVED,), new_plan=PLAN, old_plan=PLAN)
    assert decision.to_json()["moves"] == ({"shard": "a", "from_rank": 0, "to_rank": 1, "bytes": 412 << 20},)
    assert decision.to_json()["bytes_moved"] == 412 << 20
    saved = json.loads(json.dumps(decision.state_dict()))
    assert Decision.from_state_dict(saved) == decision
    older = {name: value for name, value in saved.items() if name != "moves"} | {"bytes_moved": 7}
    assert Decision.from_state_dict(older) == dataclasses.replace(decision, moves=())
