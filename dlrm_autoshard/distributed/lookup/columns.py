"""Changes pooled vectors and their gradients column by column, as each feature's table requires.

means = Means.where_needed(features, device, partial=False)      # None: the lookup pools for all tables
means.divide_(pooled_BD, batch.lengths_TB); means.divide_(gradient_BD, batch.lengths_TB)
clipping = Clipping.where_needed(features, optimizer, device)    # None: nothing is clipped
gradient_BD = clipping.cut(gradient_BD, margin)
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from dlrm_autoshard.config import TableOptimizerConfig
from dlrm_autoshard.data.features import Features


def _features_of_columns(features: Features) -> Tensor:
    """Returns the feature number [D] of each column of the pooled output."""
    order = features.output_order()
    dims = torch.tensor([features.features[i].embedding_dim for i in order], dtype=torch.int64)
    return torch.tensor(order, dtype=torch.int64).repeat_interleave(dims)


def _within(vectors_BD: Tensor, margin: tuple[int, int]) -> Tensor:
    """Returns a view without the margin of columns before and after the vectors."""
    return vectors_BD[:, margin[0] : vectors_BD.shape[1] - margin[1]]


class Means:
    """Divides sums of bags by their lengths, if only some tables average, or bags are spread over ranks."""

    def __init__(self, features: Features, device: torch.device, replicated: Collection[str] = ()) -> None:
        """replicated: tables whose copies divide themselves."""
        self._feature_of_D = _features_of_columns(features).to(device)
        averages = [[t.pooling == "mean" and t.name not in replicated] for t in features.tables]
        self._averages_F1 = torch.tensor([averages[table] for table in features.table_of]).to(device)

    @staticmethod
    def where_needed(
        features: Features, device: torch.device, replicated: Collection[str] = (), *, partial: bool
    ) -> Means | None:
        """Returns Means if needed. partial: some table is split by rows, so no lookup knows whole bags' lengths."""
        poolings = {table.pooling for table in features.tables if table.name not in replicated}
        needed = len(poolings) > 1 or (partial and "mean" in poolings)
        return Means(features, device, replicated) if needed else None

    def divide_(self, vectors_BD: Tensor, lengths_FB: Tensor, margin: tuple[int, int] = (0, 0)) -> Tensor:
        """Divides pooled vectors in output order, or their gradients, in place by the bags' lengths; empty bags stay
        zero. margin: columns before and after, which stay as they are."""
        lengths_FB = lengths_FB.to(vectors_BD.device, non_blocking=True)
        divisor_BF = torch.where(self._averages_F1, lengths_FB.clamp(min=1), 1).T.float()
        _within(vectors_BD, margin).div_(divisor_BF.index_select(1, self._feature_of_D))
        return vectors_BD


class Clipping:
    """Clips gradients elementwise for tables whose optimizer has a `max_gradient`.

    It clips on the rank that looked up, the gradient of all ranks' loss, before division by bag lengths and before
    sending, so that no plan changes the result."""

    def __init__(self, features: Features, default: TableOptimizerConfig, device: torch.device) -> None:
        """default: the optimizer of tables without their own."""
        tables = [features.tables[table] for table in features.table_of]
        most = [(table.optimizer or default).max_gradient or math.inf for table in tables]
        self._most_D = torch.tensor(most)[_features_of_columns(features)].to(device)
        self._of_sequence = [most[i] for i, own in enumerate(features.features) if own.name in features.sequences]

    @staticmethod
    def where_needed(features: Features, default: TableOptimizerConfig, device: torch.device) -> Clipping | None:
        """Returns None if no optimizer has a `max_gradient`."""
        made = Clipping(features, default, device)
        return None if made._most_D.isinf().all() and all(map(math.isinf, made._of_sequence)) else made

    def cut(self, gradient_BD: Tensor, margin: tuple[int, int]) -> Tensor:
        """Clips a copy. gradient_BD: in output order, with margins, which stay as they are."""
        cut = gradient_BD.clone()
        within = _within(cut, margin)
        torch.clamp(within, -self._most_D, self._most_D, out=within)
        return cut

    def cut_sequences(self, gradients: list[Tensor]) -> list[Tensor]:
        """Clips the gradients of each sequence's vectors, in the order of the features."""
        return [own.clamp(-most, most) for own, most in zip(gradients, self._of_sequence, strict=True)]
