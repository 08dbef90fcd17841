"""Autoshard in a plain PyTorch loop: plans, profiles, decides, moves, reports, and changes no bit of the training."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dlrm_autoshard.autoshard.autoshard import Autoshard
from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.tables.optimizers import SGD
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks
from tests.run_records import check_three_intervals

TABLES = tuple(TableConfig(f"t{i}", 2000, 32 if i < 2 else 8) for i in range(8))
POOLING = (60, 50, 1, 1, 1, 2, 1, 1)
BATCH, STEPS = 256, 90
WORST = ShardingPlan({table.name: int(i >= 2) for i, table in enumerate(TABLES)}, 2)
"""Both costly tables on rank 0."""


def ids_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * (step % 4) + rank)
    lengths = torch.tensor(POOLING)[:, None].expand(-1, BATCH)
    return lengths, torch.randint(0, 2000, (int(lengths.sum()),), generator=generator, dtype=torch.int32)


def train(rank: int, world_size: int, run_dir: Path | None) -> tuple[list[float], dict[str, Tensor], dict[str, int]]:
    bags = ShardedEmbeddingBags(TABLES, optimizer=SGD(lr=0.1), plan=WORST)
    torch.manual_seed(3)
    tower = DistributedDataParallel(nn.Sequential(nn.Linear(112, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    autoshard = None
    if run_dir is not None:
        autoshard = Autoshard(
            bags, every_steps=30, sample_every=3, total_steps=10_000, run_dir=run_dir, measure_plans=2,
            reshard={"on_change": False},
        )  # fmt: skip
    torch.manual_seed(rank)
    losses = []
    for step in range(STEPS):
        loss = nn.functional.softplus(tower(bags(*ids_of(rank, step)))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if autoshard is not None:
            autoshard.step()
    if autoshard is not None:
        autoshard.finish()
    weights = {name: value.clone() for name, value in bags.own_tensors().items()}
    del tower
    return losses, weights, dict(bags.plan.rank_of)


def test_the_worst_plan_is_left_and_not_a_bit_of_the_training_changes(tmp_path: Path) -> None:
    without = run_ranks(train, 2, None, timeout=120)
    within = run_ranks(train, 2, tmp_path / "mine", timeout=120)
    assert [losses for losses, _, _ in without] == [losses for losses, _, _ in within]
    before, after = ({name: t for _, own, _ in ranks for name, t in own.items()} for ranks in (without, within))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    plan = within[0][2]
    assert plan["t0"] != plan["t1"], "the two costly tables have a rank each"
    check_three_intervals(tmp_path / "mine")


def evaluate_now_and_then(rank: int, world_size: int, run_dir: Path) -> None:
    """After a step that is sampled next, and after one that is not."""
    bags = ShardedEmbeddingBags(TABLES, optimizer=SGD(lr=0.1), plan=WORST)
    autoshard = Autoshard(bags, every_steps=20, sample_every=2, run_dir=run_dir, reshard={"enabled": False})
    for step in range(80):
        bags(*ids_of(rank, step)).square().mean().backward()
        autoshard.step()
        if step in (44, 45):
            with autoshard.pause(), torch.no_grad():
                bags(*ids_of(rank, step))
                with autoshard.pause():
                    time.sleep(0.5)
    autoshard.finish()


def test_what_is_paused_for_is_not_counted_as_training(tmp_path: Path) -> None:
    run_ranks(evaluate_now_and_then, 2, tmp_path)
    _, before, paused, after = RunRecord.load(tmp_path).intervals
    assert paused.throughput > 0.5 * min(before.throughput, after.throughput)
    assert max(paused.mean_step_ms, *paused.step_ms_by_rank) < 100


def lines_said(rank: int, world_size: int, run_dir: Path, settings: dict[str, Any]) -> list[str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        plans_after_a_step(rank, world_size, run_dir, settings)
    return said.getvalue().splitlines()


@pytest.mark.parametrize("quiet", [False, True])
def test_rank_0_says_where_it_starts_and_what_it_decides(tmp_path: Path, quiet: bool) -> None:
    settings = {"measure_plans": 0, "reshard": {"on_change": False}, "quiet": quiet}
    first, *others = run_ranks(lines_said, 2, tmp_path, settings, timeout=120)
    assert others == [[]]
    if quiet:
        assert first == []
    else:
        start, *decisions = first
        assert f"8 tables on 2 rank(s), run directory {tmp_path}" in start and "rank 1: 't" in start
        assert decisions and {line.split("  ")[0] for line in decisions} <= {"step 4", "step 8"}


def plans_after_a_step(rank: int, world_size: int, run_dir: Path, settings: dict[str, Any]) -> dict[str, int]:
    bags = ShardedEmbeddingBags(TABLES, optimizer=SGD(lr=0.1), plan=WORST)
    autoshard = Autoshard(bags, every_steps=4, sample_every=2, run_dir=run_dir, **settings)
    for step in range(9):
        bags(*ids_of(rank, step)).square().mean().backward()
        autoshard.step()
    autoshard.finish()
    return dict(bags.plan.rank_of)


@pytest.mark.parametrize("asked", [{}, {"pinned": {"t0": 1}}, {"memory_gib": 0.001}])
def test_tables_stay_where_they_are_where_it_only_profiles(tmp_path: Path, asked: dict[str, Any]) -> None:
    """Also where no plan that is made would be theirs."""
    for rank_of in run_ranks(plans_after_a_step, 2, tmp_path, {"enabled": False, **asked}, timeout=120):
        assert rank_of == dict(WORST.rank_of)
    assert len(RunRecord.load(tmp_path).intervals) == 2 and (tmp_path / "report.html").exists()


def test_a_plan_can_be_given_as_in_the_yaml(tmp_path: Path) -> None:
    other = ShardingPlan({name: 1 - rank for name, rank in WORST.rank_of.items()}, 2)
    other.save(tmp_path / "plan.json")
    settings = {"placement": str(tmp_path / "plan.json"), "reshard": {"enabled": False}}
    for rank_of in run_ranks(plans_after_a_step, 2, tmp_path / "run", settings, timeout=120):
        assert rank_of == dict(other.rank_of)


def moved_by_the_user(rank: int, world_size: int, run_dir: Path, before_the_first: bool) -> dict[str, int]:
    bags = ShardedEmbeddingBags(TABLES, optimizer=SGD(lr=0.1), plan=WORST)
    autoshard = Autoshard(bags, every_steps=20, sample_every=2, run_dir=run_dir, reshard={"enabled": False})
    other = {name: 1 - owner for name, owner in WORST.rank_of.items()} | {"t0": 0}
    for step in range(60):
        bags(*ids_of(rank, step)).square().mean().backward()
        if step == (0 if before_the_first else 30):
            bags.move_to(ShardingPlan(other, world_size))
        autoshard.step()
    autoshard.finish()
    return dict(bags.plan.rank_of)


@pytest.mark.parametrize("before_the_first", [False, True])
def test_a_move_by_the_user_begins_a_new_interval(tmp_path: Path, before_the_first: bool) -> None:
    """Of other numbers of tables on each rank: what was observed and timed before is of another plan."""
    plans = run_ranks(moved_by_the_user, 2, tmp_path, before_the_first, timeout=100)
    intervals = RunRecord.load(tmp_path).intervals
    for interval in intervals:
        assert [table.mean_pooling for table in interval.tables] == list(POOLING)
    assert dict(intervals[-1].plan.rank_of) == plans[0] == plans[1]
    if not before_the_first:
        assert [(interval.first_step, interval.end_step) for interval in intervals] == [(1, 20), (31, 40), (40, 60)]


def step_too_early(rank: int, world_size: int, run_dir: Path) -> list[str]:
    bags = ShardedEmbeddingBags(TABLES)
    said = []
    autoshard = Autoshard(bags, run_dir=run_dir)
    for wrong in (
        autoshard.step,
        lambda: Autoshard(bags, run_dir=run_dir.parent / "taken"),
        lambda: Autoshard(bags, run_dir=run_dir.parent / "other", reshard={"every_steps": 5}),
    ):
        with pytest.raises(UserError) as caught:
            wrong()
        said.append(str(caught.value))
    return said


def test_mistakes_are_said_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "taken" / "costs").mkdir(parents=True)
    (tmp_path / "taken" / "costs" / "epochs.jsonl").write_text("")
    for early, taken, twice in run_ranks(step_too_early, 2, tmp_path / "mine"):
        assert "reshard.every_steps" in twice
        assert "before the embeddings were looked up" in early and "records of another run" in taken
