"""A loop of one's own: the trainer's bits, anybody's towers, a restart, and a DLRM script with few changes."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dlrm_autoshard as das
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.moves.reshard import ReshardRefused
from dlrm_autoshard.errors import UserError
from tests.ranks import run_ranks
from tests.trainers import config, losses, make_runtime, trainer

REPOSITORY = Path(__file__).parents[1]


class Tower(das.DenseArch):
    """Two halves for the trainer; called with both inputs in a loop of one's own."""

    def __init__(self, num_dense: int, tables: Sequence[das.TableConfig]) -> None:
        super().__init__()
        self.first = nn.Linear(num_dense, 8)
        self.rest = nn.Sequential(nn.Linear(8 + sum(t.embedding_dim for t in tables), 8), nn.ReLU(), nn.Linear(8, 1))

    def bottom(self, dense_BF: Tensor) -> Tensor:
        return self.first(dense_BF).relu()

    def top(self, bottom_BD: Tensor, pooled_BD: Tensor) -> Tensor:
        return self.rest(torch.cat([bottom_BD, pooled_BD], 1)).squeeze(1)

    def forward(self, dense_BF: Tensor, pooled_BD: Tensor) -> Tensor:
        return self.top(self.bottom(dense_BF), pooled_BD)


# As our trainer ------------------------------------------------------------------------------------------------------


def both_loops(rank: int, world_size: int, folder: Path) -> tuple[list[float], dict[str, bool]]:
    """The trainer, whose tables it plans and moves, then a loop of one's own on the same batches and weights."""
    settings = config(
        folder,
        data={"train_samples": 30 * 8 * world_size},
        model={"factory": f"{Path(__file__)}:Tower"},
        autoshard={"enabled": True, "measure_plans": 2, "budget_seconds": 2.0, "reshard": {"every_steps": 10}},
    )
    found = []
    with trainer(settings, make_runtime(rank, world_size), folder / "trainer") as made:
        tables, optimizer = made.job.embeddings.output_tables, das.SGD(lr=0.2)
        initial = [value.clone() for value in made.job.dense.module.state_dict().values()]
        with made.job.data.batches("train", 0) as loader:
            batches = list(loader)
        made.run()
        theirs = {name.removeprefix("tables."): value.clone() for name, value in made.job.state.tensors().items()}
    bags = das.ShardedEmbeddingBags(tables, optimizer=optimizer, plan=made.job.embeddings.plan)
    tower = Tower(3, tables)
    for value, first in zip(tower.state_dict().values(), initial, strict=True):
        value.copy_(first)
    model = DistributedDataParallel(tower)
    dense_optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    autoshard = das.Autoshard(bags, every_steps=10, sample_every=3, run_dir=folder / "own", budget_seconds=2.0)
    order = [made.job.embeddings.tables.index(table) for table in tables]

    def ids_of(batch: Batch) -> tuple[Tensor, Tensor]:
        parts = batch.values_N.split(batch.lengths_TB.sum(1).tolist())
        return batch.lengths_TB[order], torch.cat([parts[i] for i in order])

    for batch, ids in bags.ahead(batches, ids_of):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.dense_BF, bags(ids)), batch.labels_B)
        dense_optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        autoshard.step()
        found.append(loss.item())
    ours = {f"dense.{name}": value for name, value in tower.state_dict().items()} | bags.own_tensors()
    del model
    return found, {name: torch.equal(value, theirs[name]) for name, value in ours.items() if name in theirs}


def test_the_losses_and_weights_are_our_trainers_to_the_bit(tmp_path: Path) -> None:
    ranks = run_ranks(both_loops, 2, tmp_path, timeout=150)
    own = [sum(pair) / 2 for pair in zip(*(found for found, _ in ranks), strict=True)]
    trained = [loss for _, loss in losses(tmp_path / "trainer")]
    assert len(trained) == 30 and [np.float32(loss) for loss in own] == [np.float32(loss) for loss in trained]
    compared = [equal for _, equal in ranks]
    assert all(all(equal.values()) for equal in compared) and all(len(equal) >= 6 for equal in compared)


# Anybody's dense part ------------------------------------------------------------------------------------------------

TABLES = tuple(das.TableConfig(f"t{i}", 50, 8) for i in range(4))


def data_of(rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """(lengths, values, labels), the same for two tasks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 3, (len(TABLES), 16), generator=generator)
    values = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
    return lengths, values, torch.randint(0, 2, (16, 2), generator=generator).float()


def two_tasks(rank: int, world_size: int, folder: Path) -> tuple[dict[str, Tensor], bool, list[int]]:
    """BatchNorm and Dropout, weights that come from NumPy and differ by rank until DDP makes them one, two losses."""
    bags = das.ShardedEmbeddingBags(TABLES, optimizer=das.Adagrad(lr=0.1))
    last = nn.Linear(32, 2)
    shared = nn.Sequential(nn.BatchNorm1d(32), nn.Dropout(0.5), last)
    draw = np.random.default_rng(rank).normal(size=(2, 32))
    with torch.no_grad():
        last.weight.copy_(torch.from_numpy(draw))
    model = DistributedDataParallel(shared)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    autoshard = das.Autoshard(
        bags, every_steps=6, sample_every=2, run_dir=folder, budget_seconds=2.0, pinned={"t1": 1}, apart=[["t0", "t2"]]
    )
    for step in range(13):
        lengths, values, labels = data_of(rank, step)
        logits = model(bags(lengths, values))
        click, like = (nn.functional.binary_cross_entropy_with_logits(logits[:, i], labels[:, i]) for i in range(2))
        optimizer.zero_grad()
        (click + 0.5 * like).backward()
        optimizer.step()
        autoshard.step()
    bags.eval(), model.eval()
    with torch.no_grad():
        first = model(bags(*data_of(rank, 99)[:2]))  # where DDP gives all ranks rank 0's buffers
        before = {name: value.clone() for name, value in (*shared.state_dict().items(), *bags.own_tensors().items())}
        second = model(bags(*data_of(rank, 99)[:2]))
    after = {**shared.state_dict(), **bags.own_tensors()}
    unchanged = torch.equal(first, second) and all(torch.equal(before[name], value) for name, value in after.items())
    replica = {name: value.clone() for name, value in shared.state_dict().items()}
    del model
    plan = bags.plan.rank_of
    return replica, unchanged, [plan[table.name] for table in TABLES]


def test_a_tower_with_batchnorm_dropout_numpy_weights_and_two_losses_stays_one_model(tmp_path: Path) -> None:
    (one, fine, plan), (other, fine_too, _) = run_ranks(two_tasks, 2, tmp_path / "mine", timeout=120)
    assert fine and fine_too, "evaluation draws nothing and changes nothing"
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {"0.running_mean", "0.running_var"} < one.keys(), "buffers are in what is saved"
    assert plan[1] == 1 and plan[0] != plan[2], "the settings' pins and groups are kept to"


def resumed(rank: int, world_size: int, folder: Path) -> tuple[list[float], list[float], list[int]]:
    """30 steps in one go; and 20, of which the tables, autoshard and the dense part are saved, then 10 by new ones."""
    whole, _ = train(rank, folder / "whole", range(30))
    first, saved = train(rank, folder / "pieces", range(23), save_at=20)
    states: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(states, saved["bags"])
    saved["bags"] = {name: value for state in states for name, value in state.items()}
    last, state = train(rank, folder / "pieces", range(20, 30), saved)
    with pytest.raises(UserError, match="give its state"):
        das.Autoshard(das.ShardedEmbeddingBags(TABLES), run_dir=folder / "whole")
    return whole, first[:20] + last, [state["autoshard"]["steps"]]


def train(
    rank: int, folder: Path, steps: range, state: dict[str, Any] | None = None, save_at: int = 30
) -> tuple[list[float], dict[str, Any]]:
    bags = das.ShardedEmbeddingBags(TABLES, optimizer=das.Adagrad(lr=0.1))
    torch.manual_seed(0)
    tower = nn.Linear(32, 2)
    if state is not None:
        bags.load_state_dict(state["bags"])
        tower.load_state_dict(state["tower"])
    model = DistributedDataParallel(tower)
    autoshard = das.Autoshard(
        bags, every_steps=10, sample_every=2, run_dir=folder, budget_seconds=2.0, reshard={"on_change": False},
        state=(state or {}).get("autoshard"),
    )  # fmt: skip
    optimizer, found, saved = torch.optim.SGD(model.parameters(), lr=0.1), [], {}
    for step in steps:
        lengths, values, labels = data_of(rank, step)
        loss = nn.functional.binary_cross_entropy_with_logits(model(bags(lengths, values)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        autoshard.step()
        found.append(loss.item())
        if step + 1 == save_at:
            own = {
                name: value.clone() if isinstance(value, Tensor) else value for name, value in bags.state_dict().items()
            }
            dense = {name: value.clone() for name, value in tower.state_dict().items()}
            saved = {"bags": own, "tower": dense, "autoshard": autoshard.state_dict()}
    autoshard.finish()
    del model
    return found, saved


def resumed_with_larger_batches(rank: int, world_size: int, folder: Path) -> None:
    state: dict[str, Any] | None = None
    for samples in (16, 48):
        bags = das.ShardedEmbeddingBags(TABLES, optimizer=das.SGD(lr=0.1))
        autoshard = das.Autoshard(
            bags, every_steps=10, sample_every=2, run_dir=folder, budget_seconds=2.0, measure_plans=0, state=state
        )
        assert autoshard.state_dict() == (state or {"steps": 0})  # nothing was done yet
        lengths, values = torch.ones(len(TABLES), samples), torch.zeros(len(TABLES) * samples)
        for _ in range(10):
            bags(lengths.int(), values.int()).sum().backward()
            autoshard.step()
        state = autoshard.state_dict()


def test_what_goes_on_with_other_batches_is_told_by_these(tmp_path: Path) -> None:
    """On more or fewer ranks, say: what a step is taken to last is batch over throughput."""
    run_ranks(resumed_with_larger_batches, 2, tmp_path, timeout=100)
    assert [(record["end_step"], record["batch_size"]) for record in records(tmp_path)] == [(10, 32), (20, 96)]


def without_memory_to_move(rank: int, world_size: int, folder: Path) -> tuple[bool, int | None]:
    def refuse(plan: das.ShardingPlan, *, checksums: bool = False) -> Any:
        raise ReshardRefused("rank 1 needs 6 GiB more for its new tables, but has 2")

    start = das.ShardingPlan({table.name: 0 for table in TABLES}, world_size)
    bags = das.ShardedEmbeddingBags(TABLES, optimizer=das.SGD(lr=0.1), plan=start)
    bags.move_to = refuse  # type: ignore[method-assign]
    pinned = {"t0": 1} if "pinned" in folder.name else {}
    autoshard = das.Autoshard(bags, every_steps=5, run_dir=folder, measure_plans=0, pinned=pinned)
    for step in range(5):
        bags(*data_of(rank, step)[:2]).sum().backward()
        autoshard.step()
    return bags.plan == start, len(records(folder)) if rank == 0 else None


def test_a_first_plan_that_ranks_have_no_memory_for_ends_no_training(tmp_path: Path) -> None:
    """Tables move to it beside those that are there, which takes more than either; but what is asked is asked."""
    assert run_ranks(without_memory_to_move, 2, tmp_path / "run", timeout=60) == [(True, 1), (True, None)]
    with pytest.raises(Exception, match="rank 1 needs 6 GiB more"):
        run_ranks(without_memory_to_move, 2, tmp_path / "pinned", timeout=60)


def test_autoshard_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    for whole, pieces, steps in run_ranks(resumed, 2, tmp_path, timeout=150):
        assert whole == pieces and steps == [30]
    ends = [[record["end_step"] for record in records(tmp_path / run)] for run in ("whole", "pieces")]
    assert ends == [[10, 20, 30]] * 2


def records(run_dir: Path) -> list[dict[str, Any]]:
    from dlrm_autoshard.records.jsonl import read_jsonl

    return read_jsonl(run_dir / "costs" / "epochs.jsonl")


# A DLRM script -------------------------------------------------------------------------------------------------------

PLAIN = """
import numpy as np
import torch
from torch import nn

ROWS, DIM, BATCH, STEPS = [1000, 60, 300, 7], 8, 64, 12


class DLRM(nn.Module):
    def create_emb(self):
        emb_l = nn.ModuleList()
        for i, n in enumerate(ROWS):
            emb = nn.EmbeddingBag(n, DIM, mode="sum")
            emb.weight.data = torch.from_numpy(np.random.default_rng(i).uniform(-0.1, 0.1, (n, DIM)).astype("f4"))
            emb_l.append(emb)
        return emb_l

    def __init__(self):
        super().__init__()
        self.emb_l = self.create_emb()
        torch.manual_seed(1)
        self.bot_l = nn.Sequential(nn.Linear(4, DIM), nn.ReLU())
        pairs = (len(ROWS) + 1) * len(ROWS) // 2
        self.top_l = nn.Sequential(nn.Linear(DIM + pairs, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())

    def apply_emb(self, lS_o, lS_i):
        return [emb(lS_i[k], lS_o[k]) for k, emb in enumerate(self.emb_l)]

    def interact_features(self, x, ly):
        T = torch.cat([x] + ly, dim=1).view(len(x), -1, DIM)
        Z = torch.bmm(T, T.transpose(1, 2))
        li, lj = torch.tril_indices(T.shape[1], T.shape[1], offset=-1)
        return torch.cat([x, Z[:, li, lj]], dim=1)

    def forward(self, dense_x, lS_o, lS_i):
        x = self.bot_l(dense_x)
        return self.top_l(self.interact_features(x, self.apply_emb(lS_o, lS_i)))


def loader():
    g = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (len(ROWS), BATCH), generator=g)
        lS_i = [torch.randint(n, (int(c.sum()),), generator=g) for n, c in zip(ROWS, lengths)]
        lS_o = [torch.cat([torch.zeros(1, dtype=torch.int64), c.cumsum(0)[:-1]]) for c in lengths]
        yield torch.rand(BATCH, 4, generator=g), lS_o, lS_i, torch.randint(2, (BATCH, 1), generator=g).float()


dlrm = DLRM()
optimizer = torch.optim.SGD(dlrm.parameters(), lr=0.5)
for X, lS_o, lS_i, T in loader():
    E = nn.functional.binary_cross_entropy(dlrm(X, lS_o, lS_i), T)
    optimizer.zero_grad()
    E.backward()
    optimizer.step()
    print(E.item())
"""
CHANGES = (
    (
        '''        emb_l = nn.ModuleList()
        for i, n in enumerate(ROWS):
            emb = nn.EmbeddingBag(n, DIM, mode="sum")
            emb.weight.data = torch.from_numpy(np.random.default_rng(i).uniform(-0.1, 0.1, (n, DIM)).astype("f4"))
            emb_l.append(emb)
        return emb_l
''',
        '''        tables = [das.TableConfig(f"t{i}", n, DIM) for i, n in enumerate(ROWS)]
        emb_l = das.ShardedEmbeddingBags(tables, optimizer=das.SGD(0.5))
        for i, n in enumerate(ROWS):
            if f"t{i}.weight" in emb_l.own_tensors():
                weight = torch.from_numpy(np.random.default_rng(i).uniform(-0.1, 0.1, (n, DIM)).astype("f4"))
                emb_l.own_tensors()[f"t{i}.weight"].copy_(weight)
        return emb_l
''',
    ),
    ("import torch\n", "import torch\nimport dlrm_autoshard as das\n"),
    (
        "        return [emb(lS_i[k], lS_o[k]) for k, emb in enumerate(self.emb_l)]\n",
        "        ends = [torch.cat([o[1:], o.new_tensor([len(i)])]) for o, i in zip(lS_o, lS_i)]\n"
        "        lengths = torch.stack([end - o for end, o in zip(ends, lS_o)])\n"
        "        return list(self.emb_l.split(self.emb_l(lengths, torch.cat(lS_i))).values())\n",
    ),
    ("dlrm = DLRM()\n", 'dlrm = DLRM()\nautoshard = das.Autoshard(dlrm.emb_l, every_steps=5, run_dir="run")\n'),
    ("    optimizer.step()\n", "    optimizer.step()\n    autoshard.step()\n"),
)  # fmt: skip


def said(script: str, folder: Path) -> list[float]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def test_a_dlrm_script_with_an_embedding_bag_per_table_is_ported_in_25_lines(tmp_path: Path) -> None:
    ported = PLAIN
    for before, after in CHANGES:
        assert ported.count(before) == 1
        ported = ported.replace(before, after)
    lines = difflib.unified_diff(PLAIN.splitlines(), ported.splitlines(), n=0, lineterm="")
    assert sum(line[0] == "+" for line in list(lines)[2:]) <= 25
    assert said(ported, tmp_path) == pytest.approx(said(PLAIN, tmp_path), abs=1e-5)
