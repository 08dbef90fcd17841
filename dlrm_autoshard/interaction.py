"""How DLRM combines the dense vector with the pooled vectors: `dot`, `cat`, or `dcn`.

Input everywhere: bottom_BD [B, D] and vectors_BTD [B, T, D]. The dot interaction is the costly one, so it has its own
backward: with Z = X Xt, and S the symmetric matrix of Z's gradients, the gradient of X is one product S X.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _PairwiseDots(torch.autograd.Function):
    """[B, D] and [B, T, D] -> [B, D + F(F-1)/2], F = T + 1: the dense vector, then the dot product of each pair."""

    @staticmethod
    def forward(ctx: Any, bottom_BD: Tensor, vectors_BTD: Tensor, pairs: Tensor, where: Tensor) -> Tensor:
        num_samples, num_tables, dim = vectors_BTD.shape
        x_BFD = vectors_BTD.new_empty(num_samples, padded(num_tables + 1), dim)
        x_BFD[:, 0] = bottom_BD
        x_BFD[:, 1 : num_tables + 1] = vectors_BTD
        x_BFD[:, num_tables + 1 :] = 0
        products = torch.bmm(x_BFD, x_BFD.transpose(1, 2)).flatten(1)
        ctx.save_for_backward(x_BFD, where)
        return torch.cat([bottom_BD, products.index_select(1, pairs)], 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = gradients
        x_BFD, where = ctx.saved_tensors
        num_samples, num_vectors, dim = x_BFD.shape
        count = where.numel() // num_vectors
        symmetric = gradient[:, dim - 1 :].index_select(1, where).view(num_samples, count, num_vectors)
        symmetric.diagonal(dim1=1, dim2=2).zero_()
        gradient_x = torch.bmm(symmetric, x_BFD)
        return gradient_x[:, 0] + gradient[:, :dim], gradient_x[:, 1:], None, None


class DotInteraction(nn.Module):
    """Pairwise dot products below the diagonal, after the dense vector, as in DLRM (Naumov et al. 2019, section 2)."""

    def __init__(self, num_tables: int, dim: int) -> None:
        super().__init__()
        count = num_tables + 1
        width = padded(count)
        row, column = torch.tril_indices(count, count, offset=-1)
        self.register_buffer("pairs", row * width + column, persistent=False)
        # Where each entry of the symmetric matrix finds its gradient. Column 0 of the slice that backward takes is the
        # dense vector's last one: a place to point the diagonal at, which is zeroed afterwards, and the padding, which
        # meets the zeros of x.
        where = torch.zeros(count, width, dtype=torch.int64)
        where[row, column] = where[column, row] = torch.arange(len(row)) + 1
        self.register_buffer("where", where.flatten(), persistent=False)
        self.out_features = dim + len(row)

    def forward(self, bottom_BD: Tensor, vectors_BTD: Tensor) -> Tensor:
        result: Tensor = _PairwiseDots.apply(bottom_BD, vectors_BTD.to(bottom_BD.dtype), self.pairs, self.where)
        return result


def padded(num_vectors: int) -> int:
    """Up to a multiple of 4: MKL multiplies batches of 28 x 64 by their transposes faster than of 27 x 64."""
    return -(-num_vectors // 4) * 4


class CatInteraction(nn.Module):
    """The dense vector and all pooled vectors side by side."""

    def __init__(self, num_tables: int, dim: int) -> None:
        super().__init__()
        self.out_features = dim * (num_tables + 1)

    def forward(self, bottom_BD: Tensor, vectors_BTD: Tensor) -> Tensor:
        return torch.cat([bottom_BD, vectors_BTD.flatten(1).to(bottom_BD.dtype)], 1)


class LowRankCross(nn.Module):
    """x -> x0 * (W (V x) + b) + x, layer after layer: DCN-v2's low-rank cross network (Wang et al. 2021, eq. 2)."""

    def __init__(self, num_tables: int, dim: int, num_layers: int, rank: int) -> None:
        super().__init__()
        self.out_features = dim * (num_tables + 1)
        self.down = nn.ModuleList(nn.Linear(self.out_features, rank, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(nn.Linear(rank, self.out_features) for _ in range(num_layers))

    def forward(self, bottom_BD: Tensor, vectors_BTD: Tensor) -> Tensor:
        start = x = torch.cat([bottom_BD, vectors_BTD.flatten(1).to(bottom_BD.dtype)], 1)
        for down, up in zip(self.down, self.up, strict=True):
            x = start * up(down(x)) + x
        return x
