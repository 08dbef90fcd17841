"""Makes sharded embeddings of a few small tables on ranks of `run_ranks`, and batches for them.

embeddings = make(rank, plan, "sgd", "fp32", TABLES)
batch = global_batch(step, world_size)[rank]
"""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch
import torch.distributed as dist

from dlrm_autoshard.config import TableOptimizerConfig, TablesConfig
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.ranks.groups import new_group
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig

TABLES = [TableConfig("a", 50, 8), TableConfig("b", 1000, 4), TableConfig("c", 7, 16), TableConfig("d", 300, 8)]
BATCH = 6


def global_batch(step: int, world_size: int, tables: Sequence[TableConfig] = TABLES) -> list[Batch]:
    """Returns every rank's slice, with empty bags, duplicates, and a padded tail on the last rank."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for _ in range(world_size):
        lengths = torch.randint(0, 4, (len(tables), BATCH), generator=generator, dtype=torch.int32)
        values = [
            torch.randint(0, t.num_embeddings, (int(n),), generator=generator, dtype=torch.int32)
            for t, n in zip(tables, lengths.sum(1), strict=True)
        ]
        labels = torch.zeros(BATCH)
        batches.append(Batch(torch.zeros(BATCH, 0), lengths, torch.cat(values), labels, BATCH, BATCH * world_size))
    return batches


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def make(rank: int, plan: ShardingPlan, optimizer: str, dtype: str, tables: list[TableConfig]) -> ShardedEmbeddings:
    typed = [TableConfig(t.name, t.num_embeddings, t.embedding_dim, dtype=dtype) for t in tables]  # type: ignore[arg-type]
    config = TablesConfig(optimizer=TableOptimizerConfig(name=optimizer, lr=0.1))
    ids = new_group()
    return ShardedEmbeddings(typed, plan, config, rank=rank, group=world(), id_group=ids, device=torch.device("cpu"))


def train_step(embeddings: ShardedEmbeddings, batch: Batch) -> torch.Tensor:
    """Returns the pooled vectors before an update whose gradient is a tenth of their sines."""
    local = embeddings.lookup(embeddings.distribute(batch).finish())
    pooled = embeddings.exchange.in_output_order(embeddings.exchange.send_pooled(local).wait())
    found = pooled.clone()
    embeddings.update(local, embeddings.exchange.send_gradients(torch.sin(pooled) / 10).wait())
    return found


def own_tensors(embeddings: ShardedEmbeddings) -> dict[str, torch.Tensor]:
    """Returns copies of this rank's rows and optimizer state, by names such as `item.weight`."""
    return {
        f"{name}.{key}": value.clone()
        for name in embeddings.plan.shards_on(embeddings.rank)
        for key, value in embeddings.storage.tensors(name).items()
    }


def resident() -> int:
    """Returns the bytes of this process that are in memory now."""
    return int(psutil.Process().memory_info().rss)
