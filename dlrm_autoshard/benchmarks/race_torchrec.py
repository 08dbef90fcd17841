"""TorchRec's side of `bench race` and `bench torchrec-loop`: tables of several dims, one dense part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlrm_autoshard.benchmarks.peer_torchrec import dense_parameters, embedding_bags, find_torchrec, sharded
from dlrm_autoshard.benchmarks.workloads import DENSE_LR
from dlrm_autoshard.data.batch import Batch
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


class Job:
    """One rank's trainer, a step at a time. Ids are checked by the loader, as they are for us. Collective."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        pooling: Sequence[float],
        num_dense: int,
        batch_size: int,
        plan: Any,
        *,
        dense: type[torch.optim.Optimizer] = torch.optim.SGD,
        fused: str = "EXACT_ROWWISE_ADAGRAD",
    ) -> None:
        """plan: ours or TorchRec's; None for that of TorchRec's planner, which is told each table's pooling."""
        reason = find_torchrec()
        if reason is not None:
            raise ModuleNotFoundError(reason)
        self._keys = [table.name for table in tables]
        self.model, self.plan = sharded(
            Model(tables, num_dense), tables, pooling, batch_size,
            module="ebc", plan=plan, check_ids=False, optimizer=fused,
        )  # fmt: skip
        self.optimizer = dense(dense_parameters(self.model), lr=DENSE_LR)  # type: ignore[call-arg]

    def step(self, batch: Batch) -> torch.Tensor:
        """Its loss."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(batch.dense_BF, features_of(batch, self._keys), batch.labels_B)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def save(self, folder: Path) -> None:
        """All that goes on from it needs, in torch's own format, as TorchRec's users save theirs. Collective."""
        import torch.distributed.checkpoint as dcp

        tables = self.model.fused_optimizer.state_dict()
        dense = {"dense_optimizer": self.optimizer.state_dict()}
        dcp.save({"model": self.model.state_dict(), "tables_optimizer": tables, **dense}, checkpoint_id=folder)


def features_of(batch: Batch, keys: Sequence[str]) -> Any:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(list(keys), batch.values_N, lengths=batch.lengths_TB.flatten())
