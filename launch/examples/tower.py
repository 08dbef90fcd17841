"""Trains your own dense part with sharded tables: `python launch/examples/tower.py`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_autoshard import DenseArch, TableConfig, train


class Tower(DenseArch):
    """Has two halves; the first runs while vectors travel."""

    def __init__(self, num_dense: int, tables: Sequence[TableConfig], width: int = 64) -> None:
        """width and further arguments: from model.options."""
        super().__init__()
        pooled = sum(table.embedding_dim for table in tables)
        self.first = torch.nn.Sequential(torch.nn.Linear(num_dense, width), torch.nn.ReLU())
        self.rest = torch.nn.Sequential(
            torch.nn.Linear(width + pooled, width), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1)
        )

    def bottom(self, dense_BF: Tensor) -> Tensor:
        return self.first(dense_BF)

    def top(self, bottom_BD: Tensor, pooled_BD: Tensor) -> Tensor:
        return self.rest(torch.cat([bottom_BD, pooled_BD], 1)).squeeze(1)


if __name__ == "__main__":
    result = train(
        {
            "run": {"name": "tower", "device": "cpu"},
            "data": {
                "source": "synthetic",
                "train_samples": 10_000,
                "test_samples": 1_000,
                "tables": [{"name": "user", "num_embeddings": 2_000}, {"name": "item", "num_embeddings": 500}],
            },
            "model": {"factory": f"{__file__}:Tower", "options": {"width": 32}},
            "train": {"batch_size": 256},
        }
    )
    print(f"auc {result.metrics['auc']:.3f}, see {result.run_dir}/report.html")
