"""The plan a job starts with: what is wrong with its settings is said with the key, with a planner and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.asked import check_settings
from dlrm_autoshard.autoshard.initial_plan import find_topology
from dlrm_autoshard.config import AutoshardConfig
from dlrm_autoshard.distributed.ranks.free_memory import free_memory
from dlrm_autoshard.plan import PlanError
from dlrm_autoshard.planner.costs.replay import shards_of
from tests.ranks import run_ranks
from tests.trainers import config, make_runtime, trainer


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            {"pinned": {"usr": 0}},
            "autoshard.pinned names table 'usr', which the model does not have; it has user, it",
        ),
        ({"together": [["user", "itm"]]}, "autoshard.together names table 'itm'"),
        ({"apart": [["user", "itm"]]}, "autoshard.apart names table 'itm'"),
        ({"pinned": {"user": 2}}, r"autoshard.pinned puts table 'user' on rank 2, but there are 2 ranks \(0 to 1\)"),
        ({"exclude_ranks": [3]}, "autoshard.exclude_ranks names rank 3, but there are 2 ranks"),
        ({"memory_gib": [1.0, 2.0, 3.0]}, "autoshard.memory_gib has 3 entries, but there are 2 ranks"),
    ],
)
def test_a_setting_that_cannot_be_is_named(enabled: bool, setting: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_settings(AutoshardConfig(enabled=enabled, **setting), ["user", "item"], 2)


def budgets(rank: int, world_size: int) -> list[int]:
    """With nothing held, and where tables hold a GiB of rank 1."""
    runtime = make_runtime(rank, world_size)
    found = [find_topology(AutoshardConfig(), runtime, held).memory_bytes for held in (0, rank << 30)]
    return [(after[1] - before[1]) for before, after in [found] if before and after]


def test_what_tables_hold_already_is_theirs_to_hold() -> None:
    """In one's own loop they are placed when they are there."""
    for [more] in run_ranks(budgets, 2):
        assert more == pytest.approx(thresholds.MEMORY_SHARE * 2**30, rel=0.1)


def start(rank: int, world_size: int, folder: str) -> tuple[str, list[int]]:
    runtime = make_runtime(rank, world_size)
    said = ""
    try:
        with trainer(config(folder, autoshard={"pinned": {"usr": 0}}), runtime, folder):  # type: ignore[arg-type]
            pass
    except PlanError as error:
        said = str(error)
    return said, list(find_topology(AutoshardConfig(), runtime).memory_bytes or ())


def test_every_rank_says_so_before_anything_is_read_and_memory_is_shared_by_the_ranks_of_a_host(tmp_path: Any) -> None:
    for said, memory in run_ranks(start, 2, tmp_path):
        assert said.startswith("autoshard.pinned names table 'usr'")
        assert len(memory) == 2 and sum(memory) <= 1.1 * free_memory()


def start_thrice(rank: int, world_size: int, folder: Path) -> list[tuple[int, int, int]]:
    """Of jobs that would take days: shards in the cost log, those of plans that this start has measured, and tables
    that the planner knows alone."""
    runtime, found = make_runtime(rank, world_size), []
    for where, cache in (("runs", "auto"), ("runs", "auto"), ("others", None)):
        settings = {"enabled": True, "budget_seconds": 2.0, "reshard": {"enabled": False}, "cache_dir": cache}
        with trainer(
            config(folder / where, autoshard=settings, train={"epochs": 10**8}), runtime, folder / where / "run"
        ) as job:
            runtime.barrier()
            lines = [line for log in (folder / where / ".costs").glob("*") for line in log.read_text().splitlines()]
            of_plans = alone = 0
            if job.job.placement.planner is not None:  # on rank 0
                replay = job.job.placement.planner.costs.replay
                of_plans = sum(len(shards_of(profile)) for profile in replay.profiles)
                alone = len({shard.tables for shard in replay.shards if len(shard.tables) == 1})
            found.append((sum('"shard"' in line for line in lines), of_plans, alone))
            runtime.barrier()
    return found


def test_what_a_start_measured_is_kept_beside_the_runs_for_later_jobs(tmp_path: Path) -> None:
    [(kept, of_plans, alone), (kept_later, of_plans_later, alone_later), nowhere], _ = run_ranks(
        start_thrice, 2, tmp_path
    )
    assert alone == alone_later == 4
    assert kept - of_plans > alone, "tables, sets of them, and plans"
    assert kept_later - kept == of_plans_later, "of the second start plans alone: it measured no table again"
    assert (nowhere[0], nowhere[2]) == (0, 4)
