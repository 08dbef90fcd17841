"""Means where some tables sum and others average, or bags are on several ranks: lookups sum, and bags are divided here.

means = Means.where_needed(features, device, partial=False)      # None: the lookup pools as all tables ask
means.divide_(pooled_BD, batch.lengths_TB); means.divide_(gradient_BD, batch.lengths_TB)
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from dlrm_autoshard.data.features import Features


class Means:
    """Divides the sums of bags by their lengths, for tables that average."""

    def __init__(self, features: Features, device: torch.device, replicated: Collection[str] = ()) -> None:
        """replicated: tables whose copies divide by themselves."""
        order = features.output_order()
        dims = torch.tensor([features.features[i].embedding_dim for i in order], dtype=torch.int64)
        self._feature_of_D = torch.tensor(order, dtype=torch.int64).repeat_interleave(dims).to(device)
        averages = [[t.pooling == "mean" and t.name not in replicated] for t in features.tables]
        self._averages_F1 = torch.tensor([averages[table] for table in features.table_of]).to(device)

    @staticmethod
    def where_needed(
        features: Features, device: torch.device, replicated: Collection[str] = (), *, partial: bool
    ) -> Means | None:
        """partial: some table is split by rows, so that no lookup knows a bag's whole length."""
        poolings = {table.pooling for table in features.tables if table.name not in replicated}
        needed = len(poolings) > 1 or (partial and "mean" in poolings)
        return Means(features, device, replicated) if needed else None

    def divide_(self, vectors_BD: Tensor, lengths_FB: Tensor, margin: tuple[int, int] = (0, 0)) -> Tensor:
        """In place, pooled vectors in the output order, or gradients of them, by the lengths of their bags; empty bags
        stay zero. margin: columns before and after the vectors, which are left as they are."""
        lengths_FB = lengths_FB.to(vectors_BD.device, non_blocking=True)
        divisor_BF = torch.where(self._averages_F1, lengths_FB.clamp(min=1), 1).T.float()
        before, after = margin
        within = vectors_BD[:, before : vectors_BD.shape[1] - after]
        within.div_(divisor_BF.index_select(1, self._feature_of_D))
        return vectors_BD
