"""How DLRM combines the dense vector with the pooled vectors: `dot`, `cat`, or `dcn`.

Input everywhere: x_BX, the dense vector [B, D], every table's pooled vectors beside it, and `padding` vectors of zeros
that `dot` asks for. The pooled vectors come with a margin, so `with_dense` makes x where they lie, copying nothing.
The dot interaction is the costly one, so it has its own backward: with Z = X Xt, and S the symmetric matrix of Z's
gradients, the gradient of X is one product S X.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def with_dense(bottom_BD: Tensor, pooled_BX: Tensor, padding: int) -> Tensor:
    """x_BX, in the memory of pooled_BX and its margin: the dense vector goes first, zeros into the last `padding`
    vectors of its size."""
    result: Tensor = _WithDense.apply(bottom_BD, pooled_BX.to(bottom_BD.dtype), padding)
    return result


class _WithDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bottom_BD: Tensor, pooled_BX: Tensor, padding: int) -> Tensor:
        x_BX = pooled_BX.detach()  # the same memory, which nobody else has read yet
        ctx.dim = bottom_BD.shape[1]
        x_BX[:, : ctx.dim] = bottom_BD
        x_BX[:, x_BX.shape[1] - padding * ctx.dim :] = 0
        return x_BX

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        return gradient[:, : ctx.dim], gradient, None  # what it says of the margin is for nobody


class _PairwiseDots(torch.autograd.Function):
    """[B, F, D] -> [B, D + P]: the dense vector, then the dot product of each of P pairs."""

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
        # MKL multiplies batches of 28 x 64 by their transposes faster than of 27 x 64.
        self.padding = -count % 4
        width = count + self.padding
        row, column = torch.tril_indices(count, count, offset=-1)
        self.register_buffer("pairs", row * width + column, persistent=False)
        # Where each entry of the symmetric matrix finds its gradient. Column 0 of the slice that backward takes is the
        # dense vector's last one: a place to point the diagonal at, which is zeroed afterwards, and the padding, which
        # is multiplied by the zeros of x, or makes gradients that nobody takes.
        where = torch.zeros(width, width, dtype=torch.int64)
        where[row, column] = where[column, row] = torch.arange(len(row)) + 1
        self.register_buffer("where", where.flatten(), persistent=False)
        self.shape = width, dim
        self.out_features = dim + len(row)

    def forward(self, x_BX: Tensor) -> Tensor:
        result: Tensor = _PairwiseDots.apply(x_BX.unflatten(1, self.shape), self.pairs, self.where)
        return result


class CatInteraction(nn.Module):
    """The dense vector and all pooled vectors side by side, of any dims. width: of all of them."""

    padding = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out_features = width

    def forward(self, x_BX: Tensor) -> Tensor:
        return x_BX


class LowRankCross(nn.Module):
    """x -> x0 * (W (V x) + b) + x, layer after layer: DCN-v2's low-rank cross network (Wang et al. 2021, eq. 2)."""

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
