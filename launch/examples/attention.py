"""A tower that attends to a user's last clicks, for `model.factory` (see configs/README.md).

Each click is weighed by how well it fits the candidate item (as in DIN, Zhou et al. 2018: by a small MLP over both and
their product), so that the same history means another vector for another candidate. An MLP takes that, the pooled
features and the dense ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import dlrm_autoshard as das


class Attention(das.DenseArch):
    """candidate: the pooled feature to which each sequence's vectors are compared; of one dim with them."""

    def __init__(
        self,
        num_dense: int,
        tables: Sequence[das.TableConfig],
        *,
        sequences: Mapping[str, das.TableConfig],
        candidate: str,
        max_length: int = 50,
        hidden: int = 32,
    ) -> None:
        super().__init__()
        starts = dict(zip([t.name for t in tables], _starts([t.embedding_dim for t in tables]), strict=True))
        dims = {table.name: table.embedding_dim for table in tables}
        for name, table in sequences.items():
            if table.embedding_dim != dims[candidate]:
                raise das.UserError(
                    f"'{name}' has dim {table.embedding_dim}, the candidate '{candidate}' {dims[candidate]}: attention "
                    "compares them, so give both one table (tables.shared) or one dim."
                )
        self.columns, self.max_length = slice(starts[candidate], starts[candidate] + dims[candidate]), max_length
        self.names, dim = tuple(sequences), dims[candidate]
        self.recency = nn.Parameter(torch.zeros(max_length))  # of the newest click, the one before it, ...
        self.fit = nn.Sequential(nn.Linear(3 * dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        width = num_dense + sum(dims.values()) + 2 * dim * len(self.names)
        self.over = nn.Sequential(nn.Linear(width, 2 * hidden), nn.ReLU(), nn.Linear(2 * hidden, 1))

    def bottom(self, dense_BF: Tensor) -> Tensor:
        return dense_BF

    def top(self, bottom_BD: Tensor, pooled_BD: Tensor, sequences: Mapping[str, das.Jagged]) -> Tensor:  # type: ignore[override]
        candidate_BD = pooled_BD[:, self.columns]
        parts = [bottom_BD, pooled_BD]
        for name in self.names:
            attended_BD = self.attend(candidate_BD, *sequences[name].padded(self.max_length))
            parts += [attended_BD, attended_BD * candidate_BD]
        logits: Tensor = self.over(torch.cat(parts, 1))
        return logits.squeeze(1)

    def attend(self, candidate_BD: Tensor, clicks_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """The clicks' weighted sum; zeros of who has clicked nothing."""
        candidate_BLD = candidate_BD[:, None].expand_as(clicks_BLD)
        score_BL = self.fit(torch.cat([clicks_BLD, candidate_BLD, clicks_BLD * candidate_BLD], 2)).squeeze(2)
        age_BL = mask_BL.sum(1, keepdim=True) - 1 - torch.arange(self.max_length)
        score_BL = score_BL + self.recency[age_BL.clamp(min=0)]
        weight_BL = torch.softmax(score_BL.masked_fill(~mask_BL, -1e9), 1) * mask_BL
        return (weight_BL[:, None] @ clicks_BLD).squeeze(1)


def _starts(dims: Sequence[int]) -> list[int]:
    return [sum(dims[:number]) for number in range(len(dims))]
