"""A rank that becomes slower in mid-epoch, among real ranks: noticed there, and decided on before the epoch ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.decision import Decision, Interval
from dlrm_autoshard.autoshard.watch import Watch, steps_of_part
from dlrm_autoshard.config import Config, ProfileConfig
from dlrm_autoshard.records.interval import IntervalProfile, epochs_file
from dlrm_autoshard.records.jsonl import read_jsonl
from tests.ranks import run_ranks
from tests.trainers import TABLES, config, make_runtime, records, trainer

STEPS, SLOW_FROM = 160, 80
SLOWER = 5
"""Times longer that a rank's lookups then take: so much that a busy machine's own changes are small beside it."""


def train_with_a_slow_rank(rank: int, world_size: int, job: Config, run_dir: Path) -> list[Interval]:
    """What was decided on, on rank 0."""
    decided_on: list[Interval] = []
    with trainer(job, make_runtime(rank, world_size), run_dir) as made:
        lookup = made.job.embeddings.lookup
        resharding = made.job.intervals.resharding
        if resharding is not None and (controller := resharding.controller) is not None:
            decide = controller.decide

            def heard(interval: Interval, *given: Any) -> Decision:
                decided_on.append(interval)
                return decide(interval, *given)

            controller.decide = heard  # type: ignore[method-assign, assignment]

        def slowed(*given: Any, **options: Any) -> Any:
            time.sleep(0.02 * (SLOWER if rank == 1 and made.job.position.step >= SLOW_FROM else 1))
            return lookup(*given, **options)

        made.job.embeddings.lookup = slowed  # type: ignore[method-assign]
        made.run()
    return decided_on


def job(folder: Path, every_epochs: int) -> Config:
    data, reshard = {"train_samples": 16 * STEPS}, {"on_change": True, "every_epochs": every_epochs}
    settings = {"enabled": True, "measure_plans": 0, "algorithm": "lookup_greedy", "reshard": reshard}
    return config(folder, data=data, profile={"every_steps": 8}, autoshard=settings)


def epochs(run_dir: Path) -> list[IntervalProfile]:
    return [IntervalProfile.from_json(line) for line in read_jsonl(epochs_file(run_dir))]


@pytest.mark.alone  # another change, of the machine's, may come first
@pytest.mark.parametrize("every_epochs", [1, 3])
def test_a_slower_rank_is_noticed_and_decided_on_in_mid_epoch(tmp_path: Path, every_epochs: int) -> None:
    """However seldom decisions are asked for."""
    run_dir = tmp_path / "run"
    decided_on, _ = run_ranks(train_with_a_slow_rank, 2, job(tmp_path, every_epochs), run_dir, timeout=90)
    found = epochs(run_dir)
    assert [e.first_step for e in found] == [0, *(e.end_step for e in found[:-1])] and found[-1].end_step == STEPS
    after = [e for e in found if e.first_step >= SLOW_FROM]
    assert after and after[0].first_step <= SLOW_FROM + 8 + 3 * 2  # a usual sample, and some more of them
    assert after[0].samples >= 4 and after[0].end_step < STEPS - 50
    assert after[0].throughput < 0.75 * found[0].throughput  # of steps since the change, those before it was sure too
    decisions = records(run_dir, "decisions.jsonl")
    assert not any("too few" in d["text"] for d in decisions)  # where the epoch ends soon after one
    first = next(d for d in decisions if d["step"] > SLOW_FROM)
    assert first["step"] == after[0].end_step and first["balance_gain"] > 0.1
    changed = next(interval for interval in decided_on if interval.step == first["step"])
    assert changed.early and len(changed.timed_SW4) == len(changed.cores_S) >= 4


@pytest.mark.alone
def test_a_change_of_the_data_is_decided_on_by_the_data_since(tmp_path: Path) -> None:
    """By the data before it, its cost could only be blamed on the ranks."""
    drift = {"drift": [{"epoch": 1, "permute_pooling": True}], "train_samples": 16 * SLOW_FROM}
    autoshard = job(tmp_path, 1).autoshard.model_dump(mode="json")
    autoshard["reshard"] |= {"every_epochs": 1, "every_steps": STEPS}
    settings = config(tmp_path, data=drift, train={"epochs": 2}, profile={"every_steps": 4}, autoshard=autoshard)
    run_dir = tmp_path / "run"
    decided_on, _ = run_ranks(train_with_a_slow_rank, 2, settings, run_dir, timeout=90)
    early = next(interval for interval in decided_on if interval.early)
    found = {e.end_step: [table.mean_pooling for table in e.tables] for e in epochs(run_dir)}
    since = [stat.mean_pooling for stat in early.profile.stats]
    drawn = [table["mean_pooling"] for table in TABLES]
    assert found[early.step] == since and sorted(since) == pytest.approx(sorted(drawn), abs=0.5)
    assert found[SLOW_FROM] == pytest.approx(drawn, abs=0.5) and since != pytest.approx(drawn, abs=0.5)


def due_steps(slow: Callable[[int], float], moves_at: int | None = None) -> list[int]:
    """After which intervals of an epoch of 900 steps end early. slow: times longer that the second rank takes for a
    step. moves_at: after which tables move; else they stay."""
    sampling = Watch(ProfileConfig(every_steps=20, warmup_steps=5), 0.02)
    draw, found = np.random.default_rng(0), []
    sampling.begin(0)
    for step in range(900):
        if sampling.is_sampled(step):
            sampling.timed(step + 1)
            stages_W4 = 5 * draw.lognormal(0, 0.03, (2, 4))
            stages_W4[1] *= slow(step)
            sampling.see(stages_W4, float(stages_W4.max(axis=0).sum()))
        if sampling.is_due(sampling.unusual):
            found.append(step + 1)
            sampling.decided(step + 1, moved=step + 1 == moves_at)
    return found


CHANGE = 300
MOST_STEPS = 5 + 20 + 3 * 2
"""Until a change is decided on: warmth, the next usual sample, and three more of them."""


@pytest.mark.parametrize("moves", [False, True])
def test_a_change_is_decided_on_once_and_soon(moves: bool) -> None:
    """Whether tables stay or move; what else is to be done is seen at the interval's end."""
    first, *more = due_steps(lambda step: 2 if step >= CHANGE else 1)
    assert CHANGE < first <= CHANGE + MOST_STEPS and not more
    slow_until = first if moves else 900
    assert due_steps(lambda step: 2 if CHANGE <= step < slow_until else 1, first if moves else None) == [first]


def test_a_change_as_an_interval_ends_is_decided_on_when_the_next_has_steps_enough() -> None:
    """Those before its end are of the earlier one, whose measurements are gone."""
    watch = Watch(ProfileConfig(), 0.02)
    for slow in (*[1] * 10, *[2] * 4):
        watch.see(np.array([[5.0] * 4, [5.0 * slow] * 4]), 20.0 * slow)
    assert not watch.is_due(3) and watch.is_due(4)


def test_after_a_move_at_an_intervals_end_it_soon_is_known_how_ranks_wait() -> None:
    """Else what changes meanwhile would be taken for the usual."""
    sampling = Watch(ProfileConfig(every_steps=20, warmup_steps=5), 0.02)
    sampling.begin(0)
    sampled = []
    for step in range(200):
        if step == 100:
            sampling.decided(step, moved=True)
        if sampling.is_sampled(step):
            sampled.append(step)
            sampling.timed(step + 1)
            sampling.see(np.full((2, 4), 5.0), 20.0)
    assert [step for step in sampled if step > 90] == [104, 105, 110, 125, 145, 165, 185]


def steps_sampled(every: int | None, steps: int, interval: int, slow: Callable[[int], float]) -> list[int]:
    """Of a job in whose intervals of so many steps no table moves. slow: as in `due_steps`."""
    sampling = Watch(ProfileConfig(every_steps=every, warmup_steps=5), 0.02)
    draw, sampled, samples = np.random.default_rng(0), [], 0
    sampling.begin(0)
    for step in range(steps):
        if sampling.is_sampled(step):
            sampled.append(step)
            samples += 1
            sampling.timed(step + 1)
            stages_W4 = 5 * draw.lognormal(0, 0.01, (2, 4))
            stages_W4[1] *= slow(step)
            sampling.see(stages_W4, float(stages_W4.max(axis=0).sum()))
        if sampling.is_due(samples):
            samples = 0
            sampling.decided(step + 1, moved=False)
        if (step + 1) % interval == 0:
            sampling.ended(interval)
            sampling.decided(step + 1, moved=False)
            samples = 0
    return sampled


def test_the_longer_nothing_changes_the_fewer_steps_are_sampled_and_after_a_change_many_again() -> None:
    """Of an interval five in any case. Where `profile.every_steps` is given it is kept to."""
    change = 8000
    sampled = np.array(steps_sampled(None, 10_000, 1000, lambda step: 2 if step >= change else 1))
    assert np.diff(sampled[sampled < 105]).max() == 20
    assert len(sampled[sampled < change]) < 0.55 * change / 20
    assert all(((sampled >= at) & (sampled < at + 1000)).sum() >= 5 for at in range(0, 10_000, 1000))
    seen = sampled[sampled >= change][0]
    assert seen < change + 200  # a fifth of an interval
    assert np.diff(sampled[(sampled >= seen) & (sampled < seen + 100)]).max() <= 20
    assert len(steps_sampled(20, 8000, 1000, lambda step: 1)) == pytest.approx(8000 / 20, rel=0.03)


@pytest.mark.parametrize("interval", [50, 88, 240])
def test_short_intervals_have_enough_steps_sampled_to_decide_on(interval: int) -> None:
    sampled = np.array(steps_sampled(None, 10 * interval, interval, lambda step: 1))
    counts = np.bincount(sampled // interval)
    assert counts[0] >= thresholds.LEAST_SAMPLES and counts[1:].min() >= 4


def test_what_changes_right_after_a_decision_is_noticed_too() -> None:
    first, *_ = due_steps(lambda step: 1.5 if step >= CHANGE else 1)
    late = first + 40
    again = due_steps(lambda step: 1 if step < CHANGE else 1.5 if step < late else 4)
    assert again[0] == first and late < again[1] <= late + MOST_STEPS


def test_an_epoch_of_many_steps_is_decided_on_in_equal_parts() -> None:
    """20 times in a job, unless intervals would be shorter than 1,000 steps, or epochs are shorter."""
    assert steps_of_part(epoch=250, total=250) == steps_of_part(epoch=250, total=10_000) == 250
    assert steps_of_part(epoch=1000, total=4000) == 1000
    assert steps_of_part(epoch=2500, total=2500) == 834
    assert steps_of_part(epoch=100_000, total=100_000) == 5000
    assert steps_of_part(epoch=100_000, total=300_000) == 14_286
    assert steps_of_part(epoch=1000, total=10**6) == 1000
    assert steps_of_part(epoch=0, total=0) == 0
