"""What ranks wait for is watched step by step: changes are noticed soon, and what is only noise is not."""

from __future__ import annotations

import numpy as np
import pytest

from dlrm_autoshard.autoshard.change_watch import ChangeWatch

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


def noticed_after(watch: ChangeWatch, seen: list[tuple[np.ndarray, float]]) -> int | None:
    """Steps until it says so."""
    for number, (stages_W4, step_ms) in enumerate(seen, 1):
        watch.see(stages_W4, step_ms)
        if watch.changed:
            return number
    return None


@pytest.mark.parametrize("seed", range(20))
def test_half_a_core_taken_is_noticed_in_two_or_three_steps_and_its_return_too(seed: int) -> None:
    watch = ChangeWatch(0.02)
    assert noticed_after(watch, steps(20, seed=seed)) is None
    after = noticed_after(watch, steps(10, slow=2.0, seed=seed + 100))
    assert after in (2, 3) and watch.since == after
    assert "where it was" in watch.text


def test_steps_of_which_nothing_is_to_be_said_are_never_a_change() -> None:
    false = sum(noticed_after(ChangeWatch(0.02), steps(1000, noise=0.05, seed=seed)) is not None for seed in range(20))
    assert false <= 1  # in 20,000 sampled steps


def test_one_disturbed_step_is_suspected_and_forgiven() -> None:
    watch = ChangeWatch(0.02)
    assert noticed_after(watch, steps(20)) is None
    assert noticed_after(watch, steps(1, slow=4.0)) is None and watch.suspects
    assert noticed_after(watch, steps(6, seed=1)) is None and not watch.suspects and watch.since == 0


def test_a_machine_that_is_slower_as_a_whole_has_not_changed() -> None:
    watch = ChangeWatch(0.02)
    assert noticed_after(watch, steps(20)) is None
    assert noticed_after(watch, [(2 * stages_W4, 2 * ms) for stages_W4, ms in steps(20, seed=1)]) is None


def test_what_has_settled_is_the_usual() -> None:
    watch = ChangeWatch(0.02)
    noticed_after(watch, steps(20))
    assert noticed_after(watch, steps(5, slow=2.0)) is not None
    watch.settle()
    assert noticed_after(watch, steps(20, slow=2.0, seed=1)) is None
    assert noticed_after(watch, steps(5, slow=4.0, seed=2)) is not None


@pytest.mark.parametrize("seed", range(20))
def test_a_change_right_after_one_that_was_settled_is_noticed_as_soon(seed: int) -> None:
    watch = ChangeWatch(0.02)
    noticed_after(watch, steps(20, seed=seed))
    assert noticed_after(watch, steps(10, slow=1.5, seed=seed + 100)) is not None
    noticed_after(watch, steps(4, slow=1.5, seed=seed + 200))
    watch.settle()
    assert noticed_after(watch, steps(10, slow=2.5, seed=seed + 300)) in (2, 3)


def test_after_a_move_nothing_is_known_of_what_is_usual() -> None:
    watch = ChangeWatch(0.02)
    noticed_after(watch, steps(20))
    watch.restart()
    assert noticed_after(watch, steps(20, slow=2.0, seed=1)) is None
