"""The dense part: each interaction against its formula, dot's own backward against autograd, projections by dim."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlrm_autoshard.config import ModelConfig
from dlrm_autoshard.model.dlrm import DLRM, Projection
from dlrm_autoshard.model.interaction import CatInteraction, DotInteraction, LowRankCross, with_dense
from dlrm_autoshard.tables import TableConfig


def inputs(batch: int, tables: int, dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch + tables + dim)
    bottom = torch.randn(batch, dim, dtype=torch.float64, generator=generator)
    return bottom.requires_grad_(), torch.randn(
        batch, tables, dim, dtype=torch.float64, generator=generator
    ).requires_grad_()


def beside(bottom: Tensor, vectors: Tensor, padding: int) -> Tensor:
    """As the model does it: vectors with a margin around them."""
    room = torch.nn.functional.pad(vectors, (0, 0, 1, padding), value=float("nan"))
    return with_dense(bottom, room.flatten(1), padding)


def plain_dot(bottom: Tensor, vectors: Tensor) -> Tensor:
    every = [bottom, *vectors.unbind(1)]
    pairs = [(every[i] * every[j]).sum(1, keepdim=True) for i in range(len(every)) for j in range(i)]
    return torch.cat([bottom, *pairs], 1)


@pytest.mark.parametrize("batch,tables,dim", [(3, 4, 4), (1, 1, 8), (5, 2, 1), (0, 3, 4)])
def test_dot_and_its_gradients_are_autograds(batch: int, tables: int, dim: int) -> None:
    bottom, vectors = inputs(batch, tables, dim)
    dot = DotInteraction(tables, dim)
    result, expected = dot(beside(bottom, vectors, dot.padding)), plain_dot(bottom, vectors)
    assert result.shape == (batch, dot.out_features)
    torch.testing.assert_close(result, expected)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    own = torch.autograd.grad(result, (bottom, vectors), upstream)
    for gradient, plain in zip(own, torch.autograd.grad(expected, (bottom, vectors), upstream), strict=True):
        torch.testing.assert_close(gradient, plain)
    if batch:
        assert torch.autograd.gradcheck(lambda b, v: dot(beside(b, v, dot.padding)), (bottom, vectors))


def test_cat_and_dcn_are_their_formulas() -> None:
    bottom, vectors = inputs(3, 2, 4)
    start = torch.cat([bottom, vectors.flatten(1)], 1)
    assert torch.equal(CatInteraction(12)(beside(bottom, vectors, 0)), start)
    cross = LowRankCross(12, num_layers=2, rank=3).double()
    x = start
    for layer in range(2):
        weights = dict(cross.named_parameters())
        down, up = weights[f"down.{layer}.weight"], weights[f"up.{layer}.weight"]
        x = start * (x @ down.T @ up.T + weights[f"up.{layer}.bias"]) + x
    torch.testing.assert_close(cross(beside(bottom, vectors, 0)), x)


def test_projection_gives_each_table_of_another_dim_a_matrix_of_its_own() -> None:
    dims = [4, 4, 8, 16]
    tables = [TableConfig(f"t{i}", 10, dim) for i, dim in enumerate(dims)]
    projection = Projection(tables, 8, padding=3)
    assert {key: tuple(w.shape) for key, w in projection.weights.items()} == {"4": (2, 4, 8), "16": (1, 16, 8)}
    pooled = torch.randn(5, sum(dims))
    parts = pooled.split(dims, 1)
    expected = [
        parts[0] @ projection.weights["4"][0],
        parts[1] @ projection.weights["4"][1],
        parts[2],
        parts[3] @ projection.weights["16"][0],
    ]
    torch.testing.assert_close(projection(pooled)[:, 1:5], torch.stack(expected, 1))
    assert projection(pooled).shape == (5, 1 + 4 + 3, 8)


@pytest.mark.parametrize("interaction", ["dot", "cat", "dcn"])
def test_a_model_depends_on_its_seed_alone_and_needs_no_dense_features(interaction: str) -> None:
    config = ModelConfig(
        interaction=interaction,  # type: ignore[arg-type]
        dense_arch_layer_sizes=[6, 8],
        over_arch_layer_sizes=[5, 1],
        dcn_low_rank_dim=3,
    )
    tables = [TableConfig("a", 10, 4), TableConfig("b", 10, 8)]
    before = torch.get_rng_state()
    first, again, other = (DLRM(0, tables, config, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    logits = first.top(first.bottom(torch.zeros(3, 0)), torch.randn(3, 12 + sum(first.margin)))
    assert logits.shape == (3,) and bool(torch.isfinite(logits).all())
