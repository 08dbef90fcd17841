"""What ranks wait for is watched step by step: changes are noticed soon, and what is only noise is not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dlrm_autoshard.autoshard.watch import Watch
from dlrm_autoshard.config import ProfileConfig
from dlrm_autoshard.costs import balance_gains

RANKS = 4
EVEN_W4 = np.tile([3.0, 1.0, 1.0, 5.0], (RANKS, 1))
STEP_MS = 20.0


def steps(count: int, slow: float = 1.0, noise: float = 0.03, seed: int = 0) -> list[tuple[np.ndarray, float]]:
    """slow: times longer that the last rank computes; noise: of each rank and stage; the whole machine's is as much."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        stages_W4 = EVEN_W4 * draw.lognormal(0.0, noise, EVEN_W4.shape) * draw.lognormal(0.0, 0.1)
        stages_W4[-1, [0, 3]] *= slow
        found.append((stages_W4, STEP_MS - 10.0 + float(stages_W4.max(axis=0).sum())))
    return found


def new_watch() -> Watch:
    return Watch(ProfileConfig(), 0.02)


def settle(watch: Watch) -> None:
    """It is decided on, and tables stay."""
    watch.decided(1, moved=False)


def noticed_after(watch: Watch, seen: list[tuple[np.ndarray, float]]) -> int | None:
    """Steps until it says so."""
    for number, (stages_W4, step_ms) in enumerate(seen, 1):
        watch.see(stages_W4, step_ms)
        if watch.changed:
            return number
    return None


@pytest.mark.parametrize("seed", range(20))
def test_half_a_core_taken_is_noticed_in_four_steps(seed: int) -> None:
    watch = new_watch()
    assert noticed_after(watch, steps(20, seed=seed)) is None
    after = noticed_after(watch, steps(10, slow=2.0, seed=seed + 100))
    assert after == watch.unusual == 4
    assert "where it was" in watch.noticed


@pytest.mark.parametrize("seed", range(20))
def test_that_another_rank_is_waited_for_as_long_is_noticed_too(seed: int) -> None:
    """Under a plan for a slow rank: when it recovers, the others are as much slower than it as it was before."""
    before, after = steps(20, slow=1.5, seed=seed), steps(10, slow=1 / 1.5, seed=seed + 100)
    gains = [np.mean([balance_gains(stages_W4, ms) for stages_W4, ms in seen]) for seen in (before, after)]
    watch = new_watch()
    assert noticed_after(watch, [(stages_W4[-2:], ms) for stages_W4, ms in before]) is None
    assert noticed_after(watch, [(stages_W4[-2:], ms) for stages_W4, ms in after]) == 4
    assert abs(gains[0] - gains[1]) < 0.1
    assert watch.noticed.startswith("beside the others rank") or "where it was" in watch.noticed


def test_of_a_few_steps_little_is_known() -> None:
    """Those after a move, of a rank whose core is shared: each stage takes a time slice longer, or does not."""
    false = 0
    for seed in range(100):
        draw, watch = np.random.default_rng(seed), new_watch()
        for _ in range(8):
            stages_W4 = EVEN_W4[-2:].copy()
            stages_W4[-1, [0, 3]] += draw.choice([0.0, 2.0], size=2)
            watch.see(stages_W4, STEP_MS)
            false += watch.changed
    assert false <= 10


def test_steps_of_which_nothing_is_to_be_said_are_never_a_change() -> None:
    false = sum(noticed_after(new_watch(), steps(1000, noise=0.05, seed=seed)) is not None for seed in range(20))
    assert false <= 1  # in 20,000 sampled steps


def test_one_disturbed_step_is_suspected_and_forgiven() -> None:
    watch = new_watch()
    assert noticed_after(watch, steps(20)) is None
    assert noticed_after(watch, steps(1, slow=4.0)) is None and watch.unusual == 1
    assert noticed_after(watch, steps(6, seed=1)) is None and watch.unusual == 0


def test_a_machine_that_is_slower_as_a_whole_has_not_changed() -> None:
    watch = new_watch()
    assert noticed_after(watch, steps(20)) is None
    assert noticed_after(watch, [(2 * stages_W4, 2 * ms) for stages_W4, ms in steps(20, seed=1)]) is None


def test_what_has_settled_is_the_usual() -> None:
    watch = new_watch()
    noticed_after(watch, steps(20))
    assert noticed_after(watch, steps(5, slow=2.0)) is not None
    settle(watch)
    assert noticed_after(watch, steps(20, slow=2.0, seed=1)) is None
    assert noticed_after(watch, steps(5, slow=4.0, seed=2)) is not None


@pytest.mark.parametrize("seed", range(20))
def test_a_change_right_after_one_that_was_settled_is_noticed_as_soon(seed: int) -> None:
    watch = new_watch()
    noticed_after(watch, steps(20, seed=seed))
    assert noticed_after(watch, steps(10, slow=1.5, seed=seed + 100)) is not None
    noticed_after(watch, steps(4, slow=1.5, seed=seed + 200))
    settle(watch)
    assert noticed_after(watch, steps(10, slow=2.5, seed=seed + 300)) == 4


def test_after_a_move_nothing_is_known_of_what_is_usual() -> None:
    watch = new_watch()
    noticed_after(watch, steps(20))
    watch.decided(1, moved=True)
    assert noticed_after(watch, steps(20, slow=2.0, seed=1)) is None


def test_it_goes_on_after_a_restart_as_if_there_had_been_none() -> None:
    one, other = new_watch(), new_watch()
    noticed_after(one, steps(20, seed=1))
    one.timed(400)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    slow = steps(10, slow=2.0, seed=2)
    assert noticed_after(one, slow) == noticed_after(other, slow) is not None
    assert [one.is_sampled(step) for step in range(300, 600)] == [other.is_sampled(step) for step in range(300, 600)]
