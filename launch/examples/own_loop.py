"""Trains sharded tables in your own loop, and moves them: `torchrun --nproc_per_node=2 launch/examples/own_loop.py`."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard import Autoshard, DataParallelDense, RowwiseAdagrad, ShardedEmbeddingBags, TableConfig

TABLES = [TableConfig("user", num_embeddings=5_000, embedding_dim=16), TableConfig("item", 1_000, 16)]
BATCH = 256


def batches(rank: int, steps: int) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Yields synthetic ((lengths [T, B], values [N]), labels [B]); values hold all of table 0's ids first."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        lengths_TB = torch.randint(0, 4, (len(TABLES), BATCH), generator=generator)
        ids = [
            torch.randint(table.num_embeddings, (int(own.sum()),), generator=generator)
            for table, own in zip(TABLES, lengths_TB, strict=True)
        ]
        yield (lengths_TB, torch.cat(ids)), torch.randint(2, (BATCH,), generator=generator).float()


def main() -> None:
    dist.init_process_group("gloo")
    bags = ShardedEmbeddingBags(TABLES, optimizer=RowwiseAdagrad(lr=0.02))  # each rank owns some; the update is fused
    width = sum(table.embedding_dim for table in TABLES)
    tower = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    dense = DataParallelDense(tower, torch.optim.Adagrad, lr=0.02, clock=bags.clock)  # one all-reduce a step
    autoshard = Autoshard(bags, every_steps=50, run_dir="runs/own_loop")
    for (_, labels_B), ids in bags.ahead(batches(dist.get_rank(), 120), lambda batch: batch[0]):
        logits_B = tower(bags(ids)).squeeze(1)
        dense.backward(torch.nn.functional.binary_cross_entropy_with_logits(logits_B, labels_B))  # updates the tables
        dense.step()
        autoshard.step()  # decides every 50 steps; tables may have moved when it returns
    autoshard.finish()  # runs/own_loop/report.html
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
