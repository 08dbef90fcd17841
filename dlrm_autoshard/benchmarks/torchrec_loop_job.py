"""One rank of `bench torchrec-loop`: a TorchRec model, its batches, and what is asked of it."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dlrm_autoshard.benchmarks import race_torchrec
from dlrm_autoshard.benchmarks.peer_torchrec import find_torchrec
from dlrm_autoshard.benchmarks.race_worlds import Scale, World
from dlrm_autoshard.benchmarks.workloads import W_EMB, Workload
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory
from dlrm_autoshard.plan import ShardingPlan, Topology, round_robin

STEPS, STEPS_TO_SETTLE = 12, 2
SMALL = replace(W_EMB, rows=tuple(min(2000, rows) for rows in W_EMB.rows), batch_size=64, num_batches=4, seed=2)


def workload(name: str, seed: int) -> Workload:
    """W-emb's tables, or 50 of several dims; ids by seed."""
    drawn = replace(W_EMB, batch_size=1024, num_batches=4, seed=seed)
    if name == "W-emb":
        return drawn
    world = World("calm", seed, Scale(tables=50, gib=1.0))
    dims = tuple((i, table.embedding_dim) for i, table in enumerate(world.tables))
    rows = tuple(table.num_embeddings for table in world.tables)
    return replace(drawn, name=name, rows=rows, pooling=tuple(world.pooling(0).tolist()), dims=dims)


class Job(race_torchrec.Job):
    """On batches of its own."""

    def __init__(self, of: Workload, batches: Sequence[Batch], plan: Any, fused: str = "EXACT_ROWWISE_ADAGRAD"):
        torch.manual_seed(of.seed)
        super().__init__(of.tables, of.pooling, of.num_dense, batches[0].size, plan, fused=fused)
        self._batches = itertools.cycle(batches)

    def next_step(self) -> float:
        return float(self.step(next(self._batches)))

    def seconds(self) -> float:
        """Seconds of so many steps, the first of which don't count."""
        for _ in range(STEPS_TO_SETTLE):
            self.next_step()
        started = time.perf_counter()
        for _ in range(STEPS):
            self.next_step()
        return time.perf_counter() - started


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
    """Seconds a turn under our plan and under TorchRec's own, in turns."""
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


def losses_with_moves(rank: int, world_size: int, moves: int, moving: bool) -> list[float]:
    """SGD; every fifth move leaves a rank empty."""
    _ready()
    from dlrm_autoshard.torchrec.bags import TorchrecBags

    start = round_robin([table.name for table in SMALL.tables], Topology(world_size))
    job = Job(SMALL, SMALL.batches(rank, world_size), start, "EXACT_SGD")
    _same_rows(job.model)
    bags = TorchrecBags(job.model, job.optimizer) if moving else None
    losses = []
    for step in range(moves + 1):
        losses.append(job.next_step())
        if bags is not None:
            drawn = random.Random(step)
            only = drawn.randrange(world_size) if step % 5 == 1 else None
            ranks = {t.name: drawn.randrange(world_size) if only is None else only for t in SMALL.tables}
            bags.move_to(ShardingPlan(ranks, world_size))
    return losses


def _ready() -> None:
    assert find_torchrec() is None
    keep_freed_memory()


def _planned(of: Workload, batch: Batch, seed: int) -> Any:
    import dlrm_autoshard.torchrec as das

    module = race_torchrec.Model(of.tables, of.num_dense)
    return das.plan(module, race_torchrec.features_of(batch, [table.name for table in of.tables]), seed=seed)


def _same_rows(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "embedding_bags" in name and parameter.numel():
                generator = torch.Generator().manual_seed(sum(map(ord, name)))
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
