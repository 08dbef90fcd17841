"""Custom training loops through the public API (our module, Autoshard, our dense wrapper or DDP) against the trainer.

All variants train on the same batches, tables, plan and dense part in the same two ranks, a few steps at a time. All
send the next batch's ids ahead and run the bottom MLP while vectors travel. Their losses must be equal to the bit.
"""

from __future__ import annotations

import itertools
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from dlrm_autoshard import Autoshard, DataParallelDense, RowwiseAdagrad, ShardedEmbeddingBags
from dlrm_autoshard.benchmarks.harness import Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import paired_ratio
from dlrm_autoshard.benchmarks.steps_interleaved import interleaved, slowest_rank
from dlrm_autoshard.benchmarks.workloads import DENSE_LR, TABLE_LR, W_EMB, W_SMALL, OurJob, Workload
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.lookups import Lookup
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory
from dlrm_autoshard.model.dlrm import DLRM
from dlrm_autoshard.plan import ShardingPlan

TITLE = "custom training loops through the public API, against our trainer's step"
ROUGH_TIME = "3 min"
STEPS = 5  # of a variant before the next one's turn


def run(quick: bool) -> dict[str, Any]:
    found = Findings()
    for workload in (W_EMB, W_SMALL):
        with tempfile.TemporaryDirectory() as folder:
            ranks = on_pinned_ranks(_rank, 2, workload, Path(folder), 6 if quick else 24)
        for variant, name, target in (("own", "", "<= 1.02"), ("ddp", ", with DDP", "<= 1.06")):
            title = f"{workload.name}, 2 ranks{name}"
            for what, end in (("step time", ""), ("CPU time of a step", " cpu")):
                ratio = paired_ratio(slowest_rank(ranks, f"{variant}{end}"), slowest_rank(ranks, f"trainer{end}"))
                found.put(f"{title}: {what} over the trainer's", ratio, None if end else target, digits=3)
            found.put(f"{title}: steps whose losses differ", ranks[0][f"{variant} differ"], "== 0")
    return vars(found)


class Whole(torch.nn.Module):
    """DLRM called with the dense features and with a lookup that is under way."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.dlrm = DLRM(workload.num_dense, workload.tables, workload.model, seed=workload.seed)

    def forward(self, dense_BF: torch.Tensor, lookup: Lookup) -> torch.Tensor:
        bottom_BD = self.dlrm.bottom(dense_BF)
        return self.dlrm.top(bottom_BD, lookup.wait(self.dlrm.margin))


class OwnLoop:
    """A custom loop. ddp: the dense part is DDP's with torch's optimizer, else our wrapper's, which sums gradients."""

    def __init__(
        self, workload: Workload, plan: ShardingPlan, batches: list[Batch], folder: Path, *, ddp: bool
    ) -> None:
        optimizer = RowwiseAdagrad(lr=TABLE_LR)
        self.bags = ShardedEmbeddingBags(workload.tables, optimizer=optimizer, plan=plan, average=ddp)
        self.model: torch.nn.Module = Whole(workload)
        self.dense: DataParallelDense | None = None
        if ddp:
            self.model = DistributedDataParallel(self.model, forward_sync_buffers=False)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=DENSE_LR)
        else:
            make = partial(torch.optim.SGD, fused=True)
            self.dense = DataParallelDense(self.model, make, lr=DENSE_LR, clock=self.bags.clock, average=False)
        self.autoshard = Autoshard(self.bags, every_steps=10**6, sample_every=10**6, run_dir=folder, budget_seconds=5.0)
        self.batches = self.bags.ahead(itertools.cycle(batches), lambda batch: (batch.lengths_TB, batch.values_N))
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        batch, ids = next(self.batches)
        loss = binary_cross_entropy_with_logits(self.model(batch.dense_BF, self.bags.look_up(ids)), batch.labels_B)
        if self.dense is not None:
            self.dense.backward(loss / self.bags.world_size)
            self.dense.step()
        else:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.autoshard.step()
        self.losses.append(loss.detach())


def _rank(rank: int, world_size: int, workload: Workload, folder: Path, rounds: int) -> dict[str, Any]:
    """Returns `interleaved` steps, and the number of steps after which a loop's global loss was not the trainer's."""
    keep_freed_memory()
    plan, batches = workload.plan(world_size), workload.batches(rank, world_size)
    job, trained = OurJob(workload, plan, rank, batches), list[torch.Tensor]()
    loops = {name: OwnLoop(workload, plan, batches, folder / name, ddp=name == "ddp") for name in ("own", "ddp")}

    def trainer() -> None:
        job.run(1)
        trained.append(job.dense.global_loss.clone())

    steps = {"trainer": trainer, **{name: loop.step for name, loop in loops.items()}}
    for step in steps.values():
        step()
    for loop in loops.values():
        loop.bags.move_to(plan)  # Autoshard has planned anew after the first step
    found: dict[str, Any] = dict(interleaved(steps, turn=STEPS, rounds=rounds))
    for name, loop in loops.items():
        losses = torch.stack(loop.losses)
        dist.all_reduce(losses)
        found[f"{name} differ"] = int((losses / world_size != torch.stack(trained)).sum())
    loops.clear()  # DDP before the group goes
    return found
