"""Autoshard behind a TorchRec training loop.

autoshard = Autoshard(model, optimizer, every_steps=500, run_dir="runs/mine")    # model: DistributedModelParallel
autoshard.step()                                # on every rank, after each optimizer step; finish() writes the report
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlrm_autoshard.autoshard.autoshard import Autoshard as OfBags
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.torchrec.bags import TorchrecBags
from dlrm_autoshard.torchrec.plan import PLACEMENT


class Autoshard(OfBags):
    """As `dlrm_autoshard.Autoshard`, of all EmbeddingBagCollections of a model, whole or split by columns."""

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        run_dir: str | Path,
        every_steps: int = 500,
        same_columns: bool = True,
        **settings: Any,
    ) -> None:
        """model: a DistributedModelParallel. optimizer: follows the tables where it holds any.

        same_columns: KeyedTensor.values() keeps its order of columns after moves, which takes a copy of the pooled
        vectors; False where the model reads them by key. settings: as `dlrm_autoshard.Autoshard` takes them.

        TorchrecError, on every rank: the table, module or optimizer that can't be moved, and why.
        """
        self.bags = bags = TorchrecBags(model, optimizer, same_columns=same_columns)
        known = getattr(model.plan, PLACEMENT, None)
        super().__init__(bags, run_dir=run_dir, every_steps=every_steps, planned=known, **settings)

    @property
    def plan(self) -> ShardingPlan:
        """The live one."""
        return self.bags.plan
