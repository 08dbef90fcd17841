"""TorchRec's side of `bench race`: the same tables, of several dims, and the same dense part, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dlrm_autoshard.benchmarks.peer_torchrec import dense_parameters, embedding_bags, find_torchrec, sharded
from dlrm_autoshard.benchmarks.workloads import DENSE_LR
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig


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


def make_step(
    tables: Sequence[TableConfig], pooling: Sequence[float], num_dense: int, batch_size: int, plan: ShardingPlan | None
) -> Callable[[Batch], None]:
    """plan: None for that of TorchRec's planner, which is told each table's pooling. Ids are checked by the loader, as
    they are for us. Collective."""
    reason = find_torchrec()
    if reason is not None:
        raise ModuleNotFoundError(reason)
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keys = [table.name for table in tables]
    model, _ = sharded(Model(tables, num_dense), tables, pooling, batch_size, module="ebc", plan=plan, check_ids=False)
    optimizer = torch.optim.Adagrad(dense_parameters(model), lr=DENSE_LR)  # as our jobs have by default

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        features = KeyedJaggedTensor(keys, batch.values_N, lengths=batch.lengths_TB.flatten())
        model(batch.dense_BF, features, batch.labels_B).backward()
        optimizer.step()

    return step
