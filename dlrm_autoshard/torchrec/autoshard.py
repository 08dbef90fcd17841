"""Autoshard for a TorchRec training loop.

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
    """`dlrm_autoshard.Autoshard` for all EmbeddingBagCollections of a model, whole tables or column shards."""

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
        """model: a DistributedModelParallel. optimizer: if it holds tables' parameters, it is updated when they move.

        same_columns: keep the order of KeyedTensor.values() after moves, which copies the pooled vectors; False if the
        model reads them by key. settings: as in `dlrm_autoshard.Autoshard`.

        TorchrecError, on every rank, names the table, module or optimizer that cannot be moved, and why.
        """
        self.bags = bags = TorchrecBags(model, optimizer, same_columns=same_columns)
        known = getattr(model.plan, PLACEMENT, None)
        super().__init__(bags, run_dir=run_dir, every_steps=every_steps, planned=known, **settings)

    @property
    def plan(self) -> ShardingPlan:
        """The live plan."""
        return self.bags.plan
