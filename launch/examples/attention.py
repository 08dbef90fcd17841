"""A dense part that attends to a user's last clicks: see `model.factory` in configs/CUSTOM.md"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import dlrm_autoshard as das


class Attention(das.DenseArch):
    """Weighs each click by how well it fits the candidate item, by a small MLP (DIN, Zhou et al. 2018).

    candidate: the pooled feature to which each sequence's vectors are compared; of the same dim.
    """

    def __init__(
        self,
        num_dense: int,
        tables: Sequence[das.TableConfig],
        *,
        sequences: Mapping[str, das.TableConfig],
        candidate: str,
        max_length: int = 50,
    ) -> None:
        super().__init__()
        names, dims = [table.name for table in tables], [table.embedding_dim for table in tables]
        self.split, self.candidate, self.max_length = dims, names.index(candidate), max_length
        self.names, dim = tuple(sequences), dims[self.candidate]
        if other := [name for name, table in sequences.items() if table.embedding_dim != dim]:
            raise das.UserError(f"'{other[0]}' and the candidate '{candidate}' differ in dim; give both one table.")
        self.recency = nn.Parameter(torch.zeros(max_length))  # of the newest click, the one before it, ...
        self.fit = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))
        width = num_dense + sum(dims) + 2 * dim * len(self.names)
        self.over = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def bottom(self, dense_BF: Tensor) -> Tensor:
        return dense_BF

    def top(self, bottom_BD: Tensor, pooled_BD: Tensor, sequences: Mapping[str, das.Jagged]) -> Tensor:  # type: ignore[override]
        candidate_BD = pooled_BD.split(self.split, dim=1)[self.candidate]
        parts = [bottom_BD, pooled_BD]
        for name in self.names:
            attended_BD = self.attend(candidate_BD, *sequences[name].padded(self.max_length))
            parts += [attended_BD, attended_BD * candidate_BD]
        logits: Tensor = self.over(torch.cat(parts, 1))
        return logits.squeeze(1)

    def attend(self, candidate_BD: Tensor, clicks_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Returns the clicks' weighted sum [B, D]: zeros for a user without clicks."""
        candidate_BLD = candidate_BD[:, None].expand_as(clicks_BLD)
        score_BL = self.fit(torch.cat([clicks_BLD, candidate_BLD, clicks_BLD * candidate_BLD], 2)).squeeze(2)
        age_BL = mask_BL.sum(1, keepdim=True) - 1 - torch.arange(self.max_length)
        score_BL = score_BL + self.recency[age_BL.clamp(min=0)]
        weight_BL = torch.softmax(score_BL.masked_fill(~mask_BL, -1e9), 1) * mask_BL
        return (weight_BL[:, None] @ clicks_BLD).squeeze(1)
