"""Ranks and torchruns are killed at any moment; what goes on ends as if nothing had happened, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import kill_often, left_behind, train
from tests.moving_job import MOMENTS, Kill

pytestmark = pytest.mark.alone


@pytest.mark.timeout(300)
def test_kills_at_seeded_moments() -> None:
    """While it plans, in a step, while it saves and in a move: three times a rank, either of two, and torchrun once."""
    outcome = kill_often(4, seed=6, each=4)
    assert (outcome["kills"], outcome["survived"], outcome["notes"]) == (4, 4, [])


@pytest.mark.timeout(300)
def test_kills_amid_moves_of_row_ranges_and_grids_change_no_bit(tmp_path: Path) -> None:
    """Some chunks have gone, some not: either rank is killed, then torchrun. Rows change the order of sums, so the job
    must go on under the very plan that its checkpoint was of."""
    whole = train(tmp_path / "whole", steps=23, rows=True)
    moment = "during a move"
    kills = [Kill(moment, 4, 1), Kill(moment, 9, 0), Kill(moment, 17, 1, "torchrun")]
    killed = train(tmp_path / "killed", kills, steps=23, rows=True)
    assert len(list((tmp_path / "killed").glob("killed_*"))) == len(kills)
    assert any("rows" in name for name in whole["digests"])
    assert killed == whole and not left_behind(tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.timeout(600)  # two minutes where nothing else runs
def test_twenty_kills_at_seeded_moments() -> None:
    outcome = kill_often(20, seed=11, each=14)  # 14 on 2 ranks, 6 on 3
    assert (outcome["kills"], outcome["survived"], outcome["notes"]) == (20, 20, [])


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "torchrun"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_at_any_moment_on_any_rank(tmp_path: Path, moment: str, rank: int, victim: str) -> None:
    whole = train(tmp_path / "whole", steps=14)
    step = 0 if moment == "planning" else 7
    killed = train(tmp_path / "killed", [Kill(moment, step, rank, victim)], steps=14)  # type: ignore[arg-type]
    assert (tmp_path / "killed" / "killed_0").exists()
    assert killed == whole and len(whole["digests"]) > 16
    assert not left_behind(tmp_path / "killed")
