"""A rank is killed around a move; torchrun restarts the job, and the model ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrm_autoshard.benchmarks.kills import train


def test_killed_in_the_middle_of_a_move(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", steps=14)
    killed = train(tmp_path / "killed", "--kill", "during", "--at-step", "7", "--kill-rank", "1", steps=14)
    assert (tmp_path / "killed" / "killed").exists()
    assert killed == whole and len(whole["digests"]) > 16


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "during", "after", "training"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_killed_at_any_moment_on_any_rank(tmp_path: Path, moment: str, rank: str) -> None:
    whole = train(tmp_path / "whole")
    killed = train(tmp_path / "killed", "--kill", moment, "--at-step", "9", "--kill-rank", rank)
    assert (tmp_path / "killed" / "killed").exists()
    assert killed == whole
