"""One rank of `bench torchrec-loop`: a TorchRec model, its batches, and what is asked of it."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dlrm_autoshard.benchmarks.peer_torchrec import dense_parameters, embedding_bags, find_torchrec, sharded
from dlrm_autoshard.benchmarks.workloads import DENSE_LR, W_EMB, Workload
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig

STEPS, STEPS_TO_SETTLE, MIXED_GIB = 12, 2, 1.0


def workload(name: str, seed: int) -> Workload:
    """W-emb's tables, or 50 of several dims; ids by seed."""
    drawn = replace(W_EMB, batch_size=1024, num_batches=4, seed=seed)
    if name == "W-emb":
        return drawn
    generator = np.random.default_rng([0, seed])
    dims = generator.choice([16, 32, 64, 128], size=50)
    rows = np.exp(generator.uniform(np.log(1e3), np.log(4e6), size=50))
    rows *= min(1.0, MIXED_GIB * 2**30 / float((rows * (4 * dims + 4)).sum()))
    return replace(
        drawn,
        name=name,
        rows=tuple(rows.clip(1e3).astype(int).tolist()),
        pooling=tuple(generator.permutation(np.geomspace(1, 100, 50)).tolist()),
        dims=tuple(enumerate(dims.tolist())),
    )


class Model(nn.Module):
    """A bottom MLP, pooled vectors beside it, a top MLP; gives the loss."""

    def __init__(self, tables: Sequence[TableConfig], num_dense: int) -> None:
        super().__init__()
        self.ebc = embedding_bags(tables)
        self.bottom = nn.Sequential(nn.Linear(num_dense, 64), nn.ReLU())
        width = 64 + sum(table.embedding_dim for table in tables)
        self.top = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, features: Any, labels: torch.Tensor) -> torch.Tensor:
        logits = self.top(torch.cat([self.bottom(dense), self.ebc(features).values()], 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


class Job:
    """One rank's trainer over batches of its own. Collective."""

    def __init__(self, of: Workload, batches: Sequence[Batch], plan: Any) -> None:
        """plan: ours or TorchRec's; None for that of TorchRec's planner, which is told each table's pooling."""
        torch.manual_seed(of.seed)
        self._keys = [table.name for table in of.tables]
        self.model, self.plan = sharded(
            Model(of.tables, of.num_dense), of.tables, of.pooling, batches[0].size,
            module="ebc", plan=plan, check_ids=False,
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(dense_parameters(self.model), lr=DENSE_LR)
        self._batches = itertools.cycle(batches)

    def next_step(self) -> float:
        """Returns the loss. Ids are checked by the loader, as they are for us."""
        batch = next(self._batches)
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(batch.dense_BF, features_of(batch, self._keys), batch.labels_B)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def seconds(self) -> float:
        """Seconds of so many steps, the first of which don't count."""
        for _ in range(STEPS_TO_SETTLE):
            self.next_step()
        started = time.perf_counter()
        for _ in range(STEPS):
            self.next_step()
        return time.perf_counter() - started


def features_of(batch: Batch, keys: Sequence[str]) -> Any:
    """Returns the batch's ids as TorchRec takes them."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(list(keys), batch.values_N, lengths=batch.lengths_TB.flatten())


# What ranks do --------------------------------------------------------------------------------------------------------


def from_the_worst_plan(
    rank: int, world_size: int, folder: str, intervals: int, every: int, rounds: int
) -> tuple[dict[str, list[float]], int]:
    """Seconds a turn of the plan that Autoshard comes to from all tables on one rank, of that plan itself, and of plans
    that it had no part in; and how often it moved tables."""
    _ready()
    import dlrm_autoshard.torchrec as das
    from dlrm_autoshard.torchrec.sharding import plan_of

    of = workload("W-emb", seed=1)
    batches = of.batches(rank, world_size)
    worst = ShardingPlan({table.name: 0 for table in of.tables}, world_size)
    others = {f"planned_{seed}": _planned(of, batches[0], seed) for seed in (1, 2)}
    own = Job(of, batches, None)
    others["torchrec"] = own.plan
    del own
    gc.collect()
    job = Job(of, batches, worst)
    autoshard = das.Autoshard(
        job.model, job.optimizer, run_dir=Path(folder), every_steps=every, sample_every=4, total_steps=100_000
    )
    moves, plan = 0, worst
    for _ in range(intervals * every + 1):
        job.next_step()
        autoshard.step()
        moves, plan = moves + (autoshard.plan != plan), autoshard.plan
    autoshard.finish()
    turns = {"found": plan, "worst": worst}
    turns |= {name: plan_of(other, autoshard.bags.sharded.collections, world_size) for name, other in others.items()}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in list(turns) if number % 2 else reversed(turns):
            autoshard.bags.move_to(turns[name])
            seconds[name].append(job.seconds())
    return seconds, moves


def under_both_plans(rank: int, world_size: int, of: Workload, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds a turn under our plan and under TorchRec's own, interleaved."""
    _ready()
    batches = of.batches(rank, world_size)
    ours, theirs = Job(of, batches, _planned(of, batches[0], of.seed)), Job(of, batches, None)
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(-1, rounds):
        for at in (0, 1) if number % 2 else (1, 0):
            took = (ours, theirs)[at].seconds()
            if number >= 0:
                seconds[at].append(took)
    return seconds


def _ready() -> None:
    assert find_torchrec() is None
    keep_freed_memory()


def _planned(of: Workload, batch: Batch, seed: int) -> Any:
    import dlrm_autoshard.torchrec as das

    module = Model(of.tables, of.num_dense)
    return das.plan(module, features_of(batch, [table.name for table in of.tables]), seed=seed)
