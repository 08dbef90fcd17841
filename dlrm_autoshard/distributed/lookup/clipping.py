"""Cuts gradients of vectors, number by number, where their tables' optimizer has a `max_gradient`.

clipping = Clipping.where_needed(features, optimizer, device)        # None: nothing is cut
gradient_BD = clipping.cut(gradient_BD, margin)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlrm_autoshard.config import TableOptimizerConfig
from dlrm_autoshard.data.features import Features


class Clipping:
    """Cuts on the rank that looked up, of the gradient of all ranks' loss: before it is divided where bags are
    averaged, and before it travels. So no plan changes what is cut."""

    def __init__(self, features: Features, default: TableOptimizerConfig, device: torch.device) -> None:
        """default: the optimizer of tables without one of their own."""
        tables = [features.tables[table] for table in features.table_of]
        most = [(table.optimizer or default).max_gradient or math.inf for table in tables]
        order = features.output_order()
        dims = torch.tensor([features.features[i].embedding_dim for i in order], dtype=torch.int64)
        self._most_D = torch.tensor([most[i] for i in order]).repeat_interleave(dims).to(device)
        self._of_sequence = [most[i] for i, own in enumerate(features.features) if own.name in features.sequences]

    @staticmethod
    def where_needed(features: Features, default: TableOptimizerConfig, device: torch.device) -> Clipping | None:
        """Returns None where no optimizer has a `max_gradient`."""
        made = Clipping(features, default, device)
        return None if made._most_D.isinf().all() and all(map(math.isinf, made._of_sequence)) else made

    def cut(self, gradient_BD: Tensor, margin: tuple[int, int]) -> Tensor:
        """gradient_BD: in the output order, with margins, which are left as they are."""
        before, after = margin
        cut = gradient_BD.clone()
        within = cut[:, before : cut.shape[1] - after]
        torch.clamp(within, -self._most_D, self._most_D, out=within)
        return cut

    def cut_sequences(self, gradients: list[Tensor]) -> list[Tensor]:
        """gradients: of each sequence's vectors, in the order of the features."""
        return [own.clamp(-most, most) for own, most in zip(gradients, self._of_sequence, strict=True)]
