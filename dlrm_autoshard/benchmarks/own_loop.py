"""A loop of one's own through the public API (our module, DDP, torch's optimizer, Autoshard) against our trainer's.

Both on one workload's batches, tables, plan and dense part, in the same two ranks, a few steps of each in turn; both
send the next batch's ids ahead, the trainer's step overlaps the rest, too. Their losses must be the same to the bit.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from dlrm_autoshard import Autoshard, RowwiseAdagrad, ShardedEmbeddingBags
from dlrm_autoshard.benchmarks.harness import Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import paired_ratio
from dlrm_autoshard.benchmarks.train_speed import slowest_rank
from dlrm_autoshard.benchmarks.workloads import DENSE_LR, TABLE_LR, W_EMB, W_SMALL, OurJob, Workload
from dlrm_autoshard.distributed.lookup.exchange import with_margin
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory
from dlrm_autoshard.model.dlrm import DLRM

TITLE = "a loop of one's own through the public API, against our trainer's step"
ROUGH_TIME = "2 min"
STEPS = 5  # of one, before it is the other's turn


def run(quick: bool) -> dict[str, Any]:
    found = Findings()
    for workload in (W_EMB, W_SMALL):
        with tempfile.TemporaryDirectory() as folder:
            ranks = on_pinned_ranks(_both, 2, workload, Path(folder), 6 if quick else 24)
        for what, end, target in (("step time", "", "<= 1.02"), ("CPU time of a step", " cpu", None)):
            ratio = paired_ratio(slowest_rank(ranks, f"own{end}"), slowest_rank(ranks, f"trainer{end}"))
            found.put(f"{workload.name}, 2 ranks: {what} over the trainer's", ratio, target, digits=3)
        found.put(f"{workload.name}, 2 ranks: steps whose losses differ", ranks[0]["differ"], "== 0")
    return vars(found)


class Whole(torch.nn.Module):
    """DLRM called with both of its inputs."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.dlrm = DLRM(workload.num_dense, workload.tables, workload.model, seed=workload.seed)

    def forward(self, dense_BF: torch.Tensor, pooled_BD: torch.Tensor) -> torch.Tensor:
        return self.dlrm.top(self.dlrm.bottom(dense_BF), with_margin(pooled_BD, self.dlrm.margin))


def _both(rank: int, world_size: int, workload: Workload, folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds of each by round, and the number of steps after which their global losses were not the same."""
    keep_freed_memory()
    plan, batches = workload.plan(world_size), workload.batches(rank, world_size)
    job = OurJob(workload, plan, rank, batches)
    bags = ShardedEmbeddingBags(workload.tables, optimizer=RowwiseAdagrad(lr=TABLE_LR), plan=plan)
    replicas = [DistributedDataParallel(Whole(workload))]
    optimizer = torch.optim.SGD(replicas[0].parameters(), lr=DENSE_LR)
    autoshard = Autoshard(bags, every_steps=10**6, sample_every=10**6, run_dir=folder, budget_seconds=5.0)
    upcoming = bags.ahead(itertools.cycle(batches), lambda batch: (batch.lengths_TB, batch.values_N))
    losses: dict[str, list[torch.Tensor]] = {"trainer": [], "own": []}

    def trainer() -> None:
        for _ in range(STEPS):
            job.run(1)
            losses["trainer"].append(job.dense.global_loss.clone())

    def own() -> None:
        for _ in range(STEPS):
            batch, ids = next(upcoming)
            loss = binary_cross_entropy_with_logits(replicas[0](batch.dense_BF, bags(ids)), batch.labels_B)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            autoshard.step()
            losses["own"].append(loss.detach())

    seconds: dict[str, Any] = {"trainer": [], "own": [], "trainer cpu": [], "own cpu": []}
    for number in range(rounds + 1):
        for arm, go in (("trainer", trainer), ("own", own)) if number % 2 else (("own", own), ("trainer", trainer)):
            dist.barrier()
            started, cpu = time.perf_counter(), time.process_time()
            go()
            if number:
                seconds[arm].append((time.perf_counter() - started) / STEPS)
                seconds[f"{arm} cpu"].append((time.process_time() - cpu) / STEPS)
        if number == 0:
            bags.move_to(plan)  # the benchmark's, not the one that Autoshard found after the first step
    mine = torch.stack(losses["own"])
    dist.all_reduce(mine)
    replicas.clear()  # before the group goes
    return {**seconds, "differ": int((mine / world_size != torch.stack(losses["trainer"])).sum())}
