"""Combines the dense vector with the pooled vectors: `dot`, `cat` or `dcn`.

Every interaction takes x_BX: the dense vector [B, D], all pooled vectors beside it, then `padding` vectors of zeros
(for `dot`). Pooled vectors come with a margin, in which `with_dense` completes x without a copy. `dot` has its own
backward: with Z = X Xt and S the symmetric matrix of Z's gradients, the gradient of X is the single product S X.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def with_dense(bottom_BD: Tensor, pooled_BX: Tensor, padding: int) -> Tensor:
    """Returns x_BX in the memory of pooled_BX and its margin: the dense vector first, zeros in the last `padding`
    vectors."""
    result: Tensor = _WithDense.apply(bottom_BD, pooled_BX.to(bottom_BD.dtype), padding)
    return result


class _WithDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bottom_BD: Tensor, pooled_BX: Tensor, padding: int) -> Tensor:
        x_BX = pooled_BX.detach()  # the same memory; nothing else has read it yet
        ctx.dim = bottom_BD.shape[1]
        x_BX[:, : ctx.dim] = bottom_BD
        x_BX[:, x_BX.shape[1] - padding * ctx.dim :] = 0
        return x_BX

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        return gradient[:, : ctx.dim], gradient, None  # the margin's part of the gradient is ignored


class _PairwiseDots(torch.autograd.Function):
    """[B, F, D] -> [B, D + P]: the dense vector, then the dot products of P pairs of vectors."""

    @staticmethod
    def forward(ctx: Any, x_BFD: Tensor, pairs: Tensor, where: Tensor) -> Tensor:
        products = torch.bmm(x_BFD, x_BFD.transpose(1, 2)).flatten(1)
        ctx.save_for_backward(x_BFD, where)
        return torch.cat([x_BFD[:, 0], products.index_select(1, pairs)], 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        x_BFD, where = ctx.saved_tensors
        num_samples, num_vectors, dim = x_BFD.shape
        symmetric = gradient[:, dim - 1 :].index_select(1, where).view(num_samples, num_vectors, num_vectors)
        symmetric.diagonal(dim1=1, dim2=2).zero_()
        gradient_x = torch.bmm(symmetric, x_BFD)
        gradient_x[:, 0] += gradient[:, :dim]
        return gradient_x, None, None


class DotInteraction(nn.Module):
    """Pairwise dot products below the diagonal, after the dense vector, as in DLRM (Naumov et al. 2019, section 2)."""

    def __init__(self, num_tables: int, dim: int) -> None:
        super().__init__()
        count = num_tables + 1
        # Padded to a multiple of 4: MKL multiplies batches of 28 x 64 by their transposes faster than of 27 x 64.
        self.padding = -count % 4
        width = count + self.padding
        row, column = torch.tril_indices(count, count, offset=-1)
        self.register_buffer("pairs", row * width + column, persistent=False)
        # Index of each entry of the symmetric matrix in backward's gradients. Index 0 is the dense vector's last
        # column: a harmless value for the diagonal, which is zeroed afterwards, and for the padding, which is
        # multiplied by zeros of x or whose gradient is dropped.
        where = torch.zeros(width, width, dtype=torch.int64)
        where[row, column] = where[column, row] = torch.arange(len(row)) + 1
        self.register_buffer("where", where.flatten(), persistent=False)
        self.shape = width, dim
        self.out_features = dim + len(row)

    def forward(self, x_BX: Tensor) -> Tensor:
        result: Tensor = _PairwiseDots.apply(x_BX.unflatten(1, self.shape), self.pairs, self.where)
        return result


class CatInteraction(nn.Module):
    """Concatenates the dense vector and all pooled vectors, of any dims. width: their sum of dims."""

    padding = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out_features = width

    def forward(self, x_BX: Tensor) -> Tensor:
        return x_BX


class LowRankCross(nn.Module):
    """Computes x -> x0 * (W (V x) + b) + x per layer: DCN-v2's low-rank cross network (Wang et al. 2021, eq. 2)."""

    padding = 0

    def __init__(self, width: int, num_layers: int, rank: int) -> None:
        super().__init__()
        self.out_features = width
        self.down = nn.ModuleList(nn.Linear(self.out_features, rank, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(nn.Linear(rank, self.out_features) for _ in range(num_layers))

    def forward(self, x_BX: Tensor) -> Tensor:
        start = x = x_BX
        for down, up in zip(self.down, self.up, strict=True):
            x = start * up(down(x)) + x
        return x
