"""Autoshard behind a TorchRec loop: plans by measurements, leaves a bad plan, and changes no bit of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig
from tests import torchrec_jobs
from tests.ranks import run_ranks
from tests.run_records import check_three_intervals

pytestmark = pytest.mark.skipif(torchrec_jobs.WHY_NOT is not None, reason=torchrec_jobs.WHY_NOT or "")
NAMES = [f"t{i}" for i in range(8)]
POOLING = (60, 50, 1, 1, 1, 2, 1, 1)
BATCH, STEPS = 256, 60
WORST = ShardingPlan({name: int(i >= 2) for i, name in enumerate(NAMES)}, 2)
"""Both costly tables on rank 0."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=2000, embedding_dim=32 if i < 2 else 8, feature_names=[name])
            for i, name in enumerate(NAMES)
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        torch.manual_seed(3)
        self.tower = nn.Sequential(nn.Linear(112, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))

    def forward(self, features: Any) -> torch.Tensor:
        return nn.functional.softplus(self.tower(self.ebc(features).values())).mean()


def features_of(rank: int, step: int) -> Any:
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(1000 * (step % 4) + rank)
    lengths = torch.tensor(POOLING)[:, None].expand(-1, BATCH).reshape(-1)
    return KeyedJaggedTensor(NAMES, torch.randint(0, 2000, (int(lengths.sum()),), generator=generator), lengths=lengths)


def train(
    rank: int, world_size: int, run_dir: Path | None, planned: bool, copied: tuple[str, ...] = ()
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, int], list[str]]:
    """planned: the job starts under our plan, else under the worst one. copied: data-parallel tables."""
    assert torchrec_jobs.find_torchrec() is None
    import dlrm_autoshard.torchrec as das
    from dlrm_autoshard.torchrec.plan_format import to_sharding_plan, torchrec_plan

    module = Model()
    if planned:
        first = das.plan(module, features_of(rank, 0), optimizer="sgd", measure_plans=2)
    else:
        worst = ShardingPlan({name: owner for name, owner in WORST.rank_of.items() if name not in copied}, world_size)
        tables = [TableConfig(c.name, c.num_embeddings, c.embedding_dim) for c in module.ebc.embedding_bag_configs()]
        first = to_sharding_plan(torchrec_plan(worst, tables, "ebc", replicated=copied))
    model, optimizer = torchrec_jobs.sharded(first, module=module)
    autoshard = None
    if run_dir is not None:
        autoshard = das.Autoshard(
            model, optimizer, every_steps=20, sample_every=2, total_steps=10_000, run_dir=run_dir, measure_plans=2,
            reshard={"on_change": False},
        )  # fmt: skip
    torch.manual_seed(rank)
    losses: list[float] = []
    actions: list[str] = []
    for step in range(STEPS):
        losses.append(torchrec_jobs.train_step(model, optimizer, features_of(rank, step)))
        decision = None if autoshard is None else autoshard.step()
        actions += [] if decision is None else [decision.action]
    if autoshard is not None:
        autoshard.finish()
    rows = torchrec_jobs.all_rows(model)
    placed = {table: sharding.ranks[0] for table, sharding in model.plan.plan["ebc"].items()}
    return losses, rows, placed, actions


def test_the_worst_plan_is_left_and_not_a_bit_of_the_training_changes(tmp_path: Path) -> None:
    without = run_ranks(train, 2, None, False, timeout=150)
    within = run_ranks(train, 2, tmp_path / "mine", False, timeout=150)
    assert [losses for losses, *_ in without] == [losses for losses, *_ in within]
    assert all(torch.equal(value, within[0][1][name]) for name, value in without[0][1].items())
    placed = within[0][2]
    assert placed["t0"] != placed["t1"], "the two costly tables have a rank each"
    record = check_three_intervals(tmp_path / "mine")
    pooling = {table.name: table.mean_pooling for table in record.last.tables}
    assert pooling == pytest.approx(dict(zip(NAMES, POOLING, strict=True)))


def test_data_parallel_tables_stay_beside_those_that_are_timed_and_moved(tmp_path: Path) -> None:
    copied = ("t2", "t7")
    without = run_ranks(train, 2, None, False, copied, timeout=150)
    within = run_ranks(train, 2, tmp_path / "mine", False, copied, timeout=150)
    assert [losses for losses, *_ in without] == [losses for losses, *_ in within]
    assert within[0][2]["t0"] != within[0][2]["t1"], "the two costly tables have a rank each"
    record = check_three_intervals(tmp_path / "mine")
    assert {table.name for table in record.last.tables} == {*NAMES} - {*copied}


class WithClicks(Model):
    """Some vectors are not pooled."""

    def __init__(self) -> None:
        from torchrec import EmbeddingCollection, EmbeddingConfig

        super().__init__()
        table = EmbeddingConfig(name="clicks", num_embeddings=2000, embedding_dim=8, feature_names=["t7"])
        self.clicks = EmbeddingCollection(tables=[table], device=torch.device("meta"))

    def forward(self, features: Any) -> torch.Tensor:
        return super().forward(features) + self.clicks(features)["t7"].values().square().mean()


def beside_unpooled(rank: int, world_size: int, moves: bool) -> tuple[str, list[float], set[str]]:
    """What is said where such a model is to be planned; where TorchRec has placed it, the losses of steps between which
    its bags move, and which tables those are."""
    assert torchrec_jobs.find_torchrec() is None
    from torchrec.distributed import DistributedModelParallel

    import dlrm_autoshard.torchrec as das
    from dlrm_autoshard.torchrec.bags import TorchrecBags

    with pytest.raises(UserError) as caught:
        das.plan(WithClicks(), features_of(rank, 0))
    torch.manual_seed(0)
    model = DistributedModelParallel(WithClicks(), device=torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    bags = TorchrecBags(model)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "tower" in name], lr=0.5)
    torch.manual_seed(rank)
    losses = []
    for step in range(6):
        losses.append(torchrec_jobs.train_step(model, optimizer, features_of(rank, step)))
        if moves:
            away = {name: (owner + 1) % world_size for name, owner in bags.plan.rank_of.items()}
            bags.move_to(ShardingPlan(away, world_size))
    return str(caught.value), losses, set(bags.plan.rank_of)


def test_what_does_not_pool_is_not_planned_and_stays_where_bags_move_beside_it() -> None:
    moved, still = run_ranks(beside_unpooled, 2, True), run_ranks(beside_unpooled, 2, False)
    assert [losses for _, losses, _ in moved] == [losses for _, losses, _ in still]
    for said, losses, tables in moved:
        assert "clicks' is an EmbeddingCollection" in said and "sequences=[...]" in said
        assert {name.partition("[")[0] for name in tables} == set(NAMES) and losses[0] != losses[-1]


def mistyped(rank: int, world_size: int) -> str:
    assert torchrec_jobs.find_torchrec() is None
    import dlrm_autoshard.torchrec as das

    with pytest.raises(UserError) as caught:
        das.plan(Model(), features_of(rank, 0), measure_plan=2)
    return str(caught.value)


def test_a_setting_that_does_not_exist_is_named_with_the_one_that_does() -> None:
    for said in run_ranks(mistyped, 2):
        assert "autoshard.measure_plan" in said and "measure_plans" in said, said


def test_a_plan_by_measurements_is_where_autoshard_begins(tmp_path: Path) -> None:
    ranks = run_ranks(train, 2, tmp_path / "mine", True, timeout=150)
    first = ShardingPlan.load(tmp_path / "mine" / "plan" / "step_00000001.json")
    assert first.rank_of["t0"] != first.rank_of["t1"]
    moved = "moved" in ranks[0][3]
    assert moved or dict(first.rank_of) == ranks[0][2], "nothing moves without a decision"
