"""A loop of one's own through the public API (our module, DDP, torch's optimizer, Autoshard) against our trainer's.

Both on one workload's batches, tables, plan and dense part, in the same two ranks, a few steps of each in turn; the
trainer's step with its overlap, as it comes. Their losses are compared too: they must be the same to the bit.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

TITLE = "a loop of one's own through the public API, against our trainer's step"
ROUGH_TIME = "2 min"
STEPS = 5  # of one, before it is the other's turn


def run(quick: bool) -> dict[str, Any]:
    from dlrm_autoshard.benchmarks.harness import on_pinned_ranks, paired_ratio
    from dlrm_autoshard.benchmarks.train_speed import slowest_rank

    figures: dict[str, Any] = {}
    spread: dict[str, list[float]] = {}
    targets: dict[str, str] = {}
    for name in ("W-emb", "W-small"):
        with tempfile.TemporaryDirectory() as folder:
            found = on_pinned_ranks(_both, 2, name, Path(folder), 6 if quick else 24)
        for what, end in (("step time", ""), ("CPU time of a step", " cpu")):
            ratio = paired_ratio(slowest_rank(found, f"own{end}"), slowest_rank(found, f"trainer{end}"))
            figure = f"{name}, 2 ranks: {what} over the trainer's"
            figures[figure], spread[figure] = round(ratio.median, 3), [round(ratio.low, 3), round(ratio.high, 3)]
        targets[f"{name}, 2 ranks: step time over the trainer's"] = "<= 1.02"
        losses = f"{name}, 2 ranks: steps whose losses differ"
        figures[losses], targets[losses] = found[0]["differ"], "== 0"
    return {"figures": figures, "targets": targets, "spread": spread}


def _both(rank: int, world_size: int, name: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds of each by round, and the number of steps after which their global losses were not the same."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import binary_cross_entropy_with_logits
    from torch.nn.parallel import DistributedDataParallel

    from dlrm_autoshard import Autoshard, RowwiseAdagrad, ShardedEmbeddingBags
    from dlrm_autoshard.benchmarks.workloads import DENSE_LR, TABLE_LR, W_EMB, W_SMALL, OurJob
    from dlrm_autoshard.distributed.exchange import with_margin
    from dlrm_autoshard.distributed.runtime import keep_freed_memory
    from dlrm_autoshard.model.dlrm import DLRM

    class Whole(torch.nn.Module):
        """DLRM called with both of its inputs."""

        def __init__(self) -> None:
            super().__init__()
            self.dlrm = DLRM(workload.num_dense, workload.tables, workload.model, seed=workload.seed)

        def forward(self, dense_BF: torch.Tensor, pooled_BD: torch.Tensor) -> torch.Tensor:
            return self.dlrm.top(self.dlrm.bottom(dense_BF), with_margin(pooled_BD, self.dlrm.margin))

    keep_freed_memory()
    workload = next(each for each in (W_EMB, W_SMALL) if each.name == name)
    plan, batches = workload.plan(world_size), workload.batches(rank, world_size)
    job = OurJob(workload, plan, rank, batches)
    bags = ShardedEmbeddingBags(workload.tables, optimizer=RowwiseAdagrad(lr=TABLE_LR), plan=plan)
    replicas = [DistributedDataParallel(Whole())]
    optimizer = torch.optim.SGD(replicas[0].parameters(), lr=DENSE_LR)
    autoshard = Autoshard(bags, every_steps=10**6, sample_every=10**6, run_dir=folder, budget_seconds=5.0)
    upcoming = itertools.cycle(batches)
    losses: dict[str, list[torch.Tensor]] = {"trainer": [], "own": []}

    def trainer() -> None:
        for _ in range(STEPS):
            job.run(1)
            losses["trainer"].append(job.dense.global_loss.clone())

    def own() -> None:
        for _ in range(STEPS):
            batch = next(upcoming)
            pooled = bags(batch.lengths_TB, batch.values_N)
            loss = binary_cross_entropy_with_logits(replicas[0](batch.dense_BF, pooled), batch.labels_B)
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
