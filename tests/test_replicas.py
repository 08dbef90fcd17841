"""Small tables on every rank: what plain PyTorch computes, whatever else moves, and whoever sums their gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlrm_autoshard as das
from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.tables.init import initialise
from dlrm_autoshard.distributed.tables.optimizers import SGD, Adagrad, RowwiseAdagrad
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.plan.replicated import replicated_tables
from dlrm_autoshard.records.plans import replicated_in
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.summary import summary
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks

OPTIMIZERS: dict[str, Any] = {"sgd": SGD, "adagrad": Adagrad, "rowwise_adagrad": RowwiseAdagrad}
BATCH, STEPS = 6, 4
EPS = 1e-3
"""Adagrad's; with less, the rounding of a gradient of 1e-8 would decide a weight."""


class Drawn:
    """A job: tables, some of one feature and some of several, the replicated ones among them, and its batches."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.optimizer = draw.choice(list(OPTIMIZERS))
        self.weighted = draw.random() < 0.3
        poolings = draw.choice([["sum"], ["mean"], ["sum", "mean"]]) if not self.weighted else ["sum"]
        count = draw.randint(2, 6)
        self.tables = tuple(
            TableConfig(f"t{i}", draw.choice([1, 3, 20, 300]), draw.choice([4, 8, 8, 16]), draw.choice(poolings))  # type: ignore[arg-type]
            for i in range(count)
        )
        self.features = {"t0": ["x", "y"]} if draw.random() < 0.5 else {}
        self.replicate = draw.sample([t.name for t in self.tables], draw.randint(1, count - 1))
        self.one_each = draw.random() < 0.4
        self.joined = draw.random() < 0.6
        self.average = draw.random() < 0.5
        self.looked_up = [t for t in self.tables for _ in self.features.get(t.name, [""])]
        self.width = sum(table.embedding_dim for table in self.looked_up)
        self.seed = seed

    def ids(self, rank: int, step: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * step + rank)
        shape = (len(self.looked_up), BATCH)
        lengths = torch.ones(shape, dtype=torch.int64)
        if not self.one_each:
            lengths = torch.randint(0, 4, shape, generator=generator)
        values = [
            torch.randint(0, table.num_embeddings, (n,), generator=generator)
            for table, n in zip(self.looked_up, lengths.sum(1).tolist(), strict=True)
        ]
        values_N = torch.cat(values).to(torch.int32 if step % 2 else torch.int64)
        weights = (torch.rand(len(values_N), generator=generator),) if self.weighted else ()
        return lengths, values_N, *weights

    def tower(self) -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(self.width, 6), nn.ReLU(), nn.Linear(6, 1))

    def plan(self, world_size: int, step: int) -> ShardingPlan:
        draw = random.Random(31 * self.seed + step)
        placed = [t for t in self.tables if t.name not in self.replicate or world_size == 1]
        rank_of: dict[str, int] = {}
        for table in placed:
            for part in self._parts(table, draw):
                rank_of[part.name] = draw.randrange(world_size)
        return ShardingPlan(rank_of, world_size)

    def _parts(self, table: TableConfig, draw: random.Random) -> tuple[TableConfig, ...]:
        if table.num_embeddings >= 20 and draw.random() < 0.3:
            middle = table.num_embeddings // 2
            return table.row_range(0, middle), table.row_range(middle, table.num_embeddings)
        splits = self.optimizer != "rowwise_adagrad" and draw.random() < 0.3
        return (splits and table.halves(4)) or (table,)


def plain(job: Drawn, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    weights = {}
    for table in job.tables:
        weight = torch.zeros(table.num_embeddings, table.embedding_dim)
        initialise(weight, table.name, 0)
        weights[table.name] = weight.requires_grad_()
    state = {
        name: torch.zeros(len(weight)) if job.optimizer == "rowwise_adagrad" else torch.zeros_like(weight)
        for name, weight in weights.items()
    }
    tower, losses = job.tower(), []
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.3)
    for step in range(STEPS):
        total = torch.zeros(())
        for rank in range(world_size):
            lengths, values, *per_id = job.ids(rank, step)
            counts = lengths.sum(1).tolist()
            pooled = []
            by_feature = zip(job.looked_up, lengths, values.long().split(counts), strict=True)
            of_ids = per_id[0].split(counts) if per_id else [None] * len(counts)
            for (table, row, own), multiplied in zip(by_feature, of_ids, strict=True):
                offsets = torch.cat([torch.zeros(1, dtype=torch.int64), row.cumsum(0)[:-1]])
                pooled.append(
                    nn.functional.embedding_bag(
                        own, weights[table.name], offsets, mode=table.pooling, per_sample_weights=multiplied
                    )
                )
            loss = tower(torch.cat(pooled, 1)).square().mean()
            losses.append(loss.item())
            total = total + loss / world_size
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        with torch.no_grad():
            for name, weight in weights.items():
                assert weight.grad is not None
                if job.optimizer == "sgd":
                    weight -= 0.3 * weight.grad
                    continue
                squares = weight.grad.square()
                state[name] += squares.mean(1) if job.optimizer == "rowwise_adagrad" else squares
                root = state[name].sqrt() + EPS
                weight -= 0.3 * weight.grad / (root[:, None] if root.dim() == 1 else root)
                weight.grad = None
            if job.optimizer == "sgd":
                for weight in weights.values():
                    weight.grad = None
    found = {f"{name}.weight": weight.detach() for name, weight in weights.items()}
    if job.optimizer != "sgd":
        found |= {f"{name}.momentum1": value for name, value in state.items()}
    return losses, found


def ours(rank: int, world_size: int, seed: int) -> tuple[list[float], dict[str, Tensor], int]:
    job = Drawn(seed)
    bags = ShardedEmbeddingBags(
        job.tables,
        optimizer=OPTIMIZERS[job.optimizer](lr=0.3, **({} if job.optimizer == "sgd" else {"eps": EPS})),
        plan=job.plan(world_size, -1),
        features=job.features,
        average=job.average,
        replicate=job.replicate,
    )
    tower = job.tower()
    dense = das.DataParallelDense(
        tower, torch.optim.SGD, lr=0.3, replicas=bags.replicas if job.joined else None, average=job.average
    )
    losses = []
    for step in range(STEPS):
        loss = tower(bags(*job.ids(rank, step))).square().mean()
        losses.append(loss.item())
        dense.backward(loss if job.average else loss / world_size)
        dense.step()
        bags.move_to(job.plan(world_size, step))
    same = 0 if bags.replicas is None else bags.replicas.fingerprint()
    return losses, {name: value.clone() for name, value in bags.own_tensors().items()}, same


def check(seed: int) -> None:
    job, world_size = Drawn(seed), 1 + seed % 3
    expected, tables = plain(job, world_size)
    ranks = run_ranks(ours, world_size, seed)
    assert len({same for *_, same in ranks}) == 1, "copies differ between ranks"
    found = [loss for of_step in zip(*(losses for losses, *_ in ranks), strict=True) for loss in of_step]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    for _, own, _ in ranks:
        for name, value in own.items():
            if "[" not in name:
                assert torch.allclose(value, tables[name], rtol=1e-4, atol=1e-6), (seed, name)


@pytest.mark.parametrize("seed", range(12))
def test_a_drawn_job_learns_what_plain_pytorch_does(seed: int) -> None:
    check(seed)


@pytest.mark.slow
def test_many_drawn_jobs_learn_what_plain_pytorch_does() -> None:
    for seed in range(12, 90):
        check(seed)


# -- in a loop of one's own --------------------------------------------------------------------------------------------

TABLES = (
    TableConfig("item", 500, 16),
    TableConfig("day", 7, 8),
    TableConfig("user", 1000, 4),
    TableConfig("hour", 24, 16),
)


def ids_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    values = [torch.randint(0, table.num_embeddings, (BATCH,), generator=generator) for table in TABLES]
    return torch.ones(len(TABLES), BATCH, dtype=torch.int64), torch.cat(values)


def merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for own in ranks for name, value in own.items()}


def continued(rank: int, world_size: int, replicate: list[str], state: dict[str, Any] | None) -> dict[str, Any]:
    bags = ShardedEmbeddingBags(TABLES, optimizer=Adagrad(lr=0.5), replicate=replicate)
    first = 0
    if state is not None:
        missing, unexpected = bags.load_state_dict(state, strict=False)
        assert not missing and not unexpected
        first = 2
    for step in range(first, first + 2):
        bags(*ids_of(0, step)).square().sum().backward()  # all ranks have one batch, as one rank alone would
    state = bags.state_dict()
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def test_state_loads_whichever_tables_were_replicated_on_any_number_of_ranks() -> None:
    before = merged(run_ranks(continued, 2, ["day", "hour"], None))
    assert before.keys() == merged(run_ranks(continued, 2, [], None)).keys()
    found = [
        merged(run_ranks(continued, world_size, replicate, before))
        for world_size, replicate in ((2, ["day", "hour"]), (2, ["user"]), (1, ["day"]), (3, []), (3, ["item", "day"]))
    ]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, value in ((name, value) for name, value in found[0].items() if isinstance(value, Tensor)):
            assert torch.allclose(value, other[name], rtol=1e-3, atol=1e-5), name


def several(rank: int, world_size: int, how: str) -> dict[str, Tensor]:
    """Two lookups of each step, both of which the loss is made of; another that comes to nothing between them."""
    bags = ShardedEmbeddingBags(TABLES, optimizer=SGD(lr=0.1), replicate=["day", "hour"])
    bottom = nn.Linear(3, 1)
    replicas = bags.replicas if "joined" in how else None
    dense = das.DataParallelDense(bottom, torch.optim.SGD, lr=0.1, replicas=replicas, clock=bags.clock)
    for step in range(3):
        with bags.clock.step(sampled="sampled" in how):
            first, second = (bags.look_up(*ids_of(rank, 2 * step + i)) for i in range(2))
            dropped = bags.look_up(*ids_of(rank, 7))
            dropped.cancel()
            with torch.no_grad():
                bags(*ids_of(rank, 8))
            hidden = bottom(torch.ones(BATCH, 3))
            loss = (first.wait() + second.wait()).sum() + hidden.sum()
            if "joined" in how:
                dense.backward(loss)
                assert (dense._reduced is None) == ("sampled" in how), "the sum starts in the backward pass"
                dense.step()
            else:
                loss.backward()
    assert bags.replicas is not None and not bags.replicas.outstanding
    return {name: value.clone() for name, value in bags.own_tensors().items()}


def test_lookups_on_their_way_together_are_summed_once() -> None:
    hows = ("alone", "joined", "alone, sampled", "joined, sampled")
    alone, *others = (run_ranks(several, 2, how, timeout=60) for how in hows)
    assert all(torch.equal(alone[0][name], alone[1][name]) for name in ("day.weight", "hour.weight"))
    for found in others:
        for own, same in zip(found, alone, strict=True):
            assert all(torch.equal(value, same[name]) for name, value in own.items())


def moved(rank: int, world_size: int, moves: bool) -> list[Tensor]:
    bags = ShardedEmbeddingBags(TABLES, optimizer=RowwiseAdagrad(lr=0.5), replicate=["day", "hour"])
    found = []
    for step in range(4):
        found.append(pooled := bags(*ids_of(rank, step)))
        pooled.sin().sum().backward()
        if moves:
            bags.move_to(ShardingPlan({name: (step + i) % 2 for i, name in enumerate(("item", "user"))}, world_size))
    return [pooled.detach() for pooled in found]


def test_moves_of_the_other_tables_change_no_bit() -> None:
    for stayed, went in zip(run_ranks(moved, 2, False), run_ranks(moved, 2, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(stayed, went, strict=True))


# -- which ones --------------------------------------------------------------------------------------------------------


def chosen(asked: str | list[str], **given: Any) -> tuple[str, ...]:
    usual: dict[str, Any] = {"batch_size": 512, "world_size": 2, "exchange_bytes": 8, "optimizer": "sgd"}
    usual["features"] = {table.name: 1 for table in TABLES}
    return replicated_tables(asked, given.pop("tables", TABLES), **(usual | given))


def test_auto_takes_tables_whose_gradients_are_fewer_bytes_than_their_vectors() -> None:
    assert chosen("auto") == ("item", "day", "hour")
    assert chosen("auto", batch_size=500) == ("day", "hour")
    assert chosen("auto", exchange_bytes=4) == ("day", "hour")
    assert chosen("auto", features={"item": 1, "day": 1, "user": 2, "hour": 1}) == ("day", "user", "hour")
    assert chosen("auto", batch_size=10_000) == ("day", "user", "hour"), "the largest stays with an owner"
    assert chosen("auto", world_size=1) == chosen("none") == chosen("auto", optimizer="adam") == ()
    assert chosen("auto", placed={"day"}) == ("item", "hour")
    assert chosen("auto", tables=[replace(table, dtype="fp16") for table in TABLES]) == ()


@pytest.mark.parametrize(
    ("asked", "given", "said"),
    [
        (["dya"], {}, "'dya', which the model does not have. Did you mean 'day'?"),
        ("some", {}, "replicate is 'some'; it must be 'auto', 'none' or a list of tables."),
        (["day"], {"optimizer": "adam"}, "table 'day', but Adam updates only"),
        (["day"], {"placed": {"day"}}, "a constraint places it too"),
        (["day"], {"tables": [replace(table, dtype="fp16") for table in TABLES]}, "which is fp16"),
        ([table.name for table in TABLES], {}, "names all tables"),
    ],
)
def test_what_cannot_be_replicated_is_named(asked: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        chosen(asked, **given)
    assert said in str(caught.value)


def refused(rank: int, world_size: int) -> list[str]:
    said = []

    def refuses(call: Callable[[], object]) -> None:
        with pytest.raises(UserError) as caught:
            call()
        said.append(str(caught.value))

    refuses(lambda: ShardedEmbeddingBags(TABLES, replicate="auto"))
    refuses(lambda: ShardedEmbeddingBags(TABLES, replicate=["day"] if rank else ["hour"]))
    bags = ShardedEmbeddingBags(TABLES, replicate="auto", batch_size=100)
    assert bags.replicas is not None and [table.name for table in bags.replicas.tables] == ["day", "hour"]
    refuses(lambda: bags.move_to(ShardingPlan({table.name: 0 for table in TABLES}, world_size)))
    return said


def test_ranks_that_differ_and_plans_of_replicated_tables_are_refused() -> None:
    for no_batch, differ, placed in run_ranks(refused, 2):
        assert "needs batch_size=" in no_batch and "the plan's rank of 'day' is 1 on rank 0, but not there" in differ
        assert "places 'day', 'hour', which the model does not have" in placed


def with_autoshard(rank: int, world_size: int, folder: Path) -> None:
    bags = ShardedEmbeddingBags(TABLES, optimizer=Adagrad(lr=0.5), replicate="auto", batch_size=30)
    tower = nn.Linear(sum(table.embedding_dim for table in TABLES), 1)
    dense = das.DataParallelDense(tower, torch.optim.SGD, lr=0.1, replicas=bags.replicas, clock=bags.clock)
    autoshard = das.Autoshard(bags, every_steps=3, sample_every=1, run_dir=folder, budget_seconds=1, measure_plans=0)
    for step in range(7):
        dense.backward(tower(bags(*ids_of(rank, step))).square().mean())
        dense.step()
        autoshard.step()
    assert set(bags.plan.tables) == {"item", "user"} and len(set(bags.runtime.all_gather(dense.fingerprint()))) == 1
    autoshard.finish()


def test_the_other_tables_are_planned_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    run_ranks(with_autoshard, 2, tmp_path / "run", timeout=60)
    assert [table.name for table in replicated_in(tmp_path / "run")] == ["day", "hour"]
    assert "2 small tables are on every rank: 'day', 'hour'." in summary(RunRecord.load(tmp_path / "run"))
