"""Row-wise Adagrad by fbgemm's plain loop: the update of its generated code, whatever is looked up."""

import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlrm_autoshard.config import TableOptimizerConfig
from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.tables import rowwise_adagrad
from dlrm_autoshard.distributed.tables.rowwise_adagrad import RowwiseAdagradTbe, plain_loop_is_faster
from dlrm_autoshard.distributed.tables.tbe import Tbe, make_tbe
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def tables(shapes: Sequence[tuple[int, int]], pooling: str = "sum", seed: int = 0) -> RowwiseAdagradTbe:
    generator = torch.Generator().manual_seed(seed)
    sizes = [rows * dim for rows, dim in shapes]
    weights = torch.empty(sum(sizes)).uniform_(-0.1, 0.1, generator=generator)
    squares = torch.empty(sum(rows for rows, _ in shapes)).uniform_(0, 0.01, generator=generator)
    memory = {
        "weights": (weights, [sum(sizes[:t]) for t in range(len(sizes))]),
        "momentum1": (squares, [sum(rows for rows, _ in shapes[:t]) for t in range(len(shapes))]),
    }
    with patch("dlrm_autoshard.distributed.tables.tbe.plain_loop_is_faster", return_value=True):
        tbe = make_tbe(shapes, memory, TableOptimizerConfig(lr=0.05), "fp32", pooling, CPU)
    assert isinstance(tbe, RowwiseAdagradTbe)
    return tbe


def train(tbe: RowwiseAdagradTbe, batches: Sequence[tuple[Tensor, ...]], *, generated: bool) -> list[Tensor]:
    """Pooled vectors of every step, then weights and sums of squares."""
    seen = []
    for step, (gradient, *ids) in enumerate(batches):
        tbe.set_learning_rate(0.05 / (1 + step))
        pooled = Tbe.forward(tbe, *ids) if generated else tbe(*ids)
        pooled.backward(gradient)
        seen.append(pooled.detach())
    return [*seen, tbe.weights_host.detach(), tbe.momentum1_host]


def drawn(
    generator: np.random.Generator, shapes: Sequence[tuple[int, int]], samples: int, weighted: bool, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    lengths = generator.poisson(generator.uniform(0, 4, len(shapes))[:, None], (len(shapes), samples))
    values = [generator.integers(0, rows, own.sum()) for (rows, _), own in zip(shapes, lengths, strict=True)]
    offsets = np.concatenate([[0], lengths.ravel().cumsum()])
    ids = torch.from_numpy(np.concatenate(values)).to(dtype), torch.from_numpy(offsets).to(dtype)
    gradient = torch.from_numpy(generator.normal(size=(samples, sum(dim for _, dim in shapes)))).float()
    weights = torch.from_numpy(generator.uniform(0.1, 2, len(ids[0]))).float()
    return (gradient, *ids, weights) if weighted else (gradient, *ids)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 60), st.sampled_from([4, 8, 20, 64])), min_size=1, max_size=5),
    samples=st.integers(1, 30),
    pooling=st.sampled_from(["sum", "mean"]),
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_the_same_lookups_and_but_for_the_last_bits_the_same_update_as_fbgemms_generated_code(
    shapes: list[tuple[int, int]], samples: int, pooling: str, weighted: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    weighted = weighted and pooling == "sum"
    batches = [drawn(generator, shapes, samples, weighted, dtype) for _ in range(3)]
    ours = train(tables(shapes, pooling, seed), batches, generated=False)
    theirs = train(tables(shapes, pooling, seed), batches, generated=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
    assert ours[0].equal(theirs[0])  # the first lookup, before any update


def test_a_row_learns_from_the_mean_square_of_its_summed_gradient() -> None:
    tbe = tables([(3, 4), (2, 8)])
    weights, squares = tbe.weights_host.detach().clone().double(), tbe.momentum1_host.clone().double()
    gradient = torch.arange(24.0).view(2, 12) / 10
    # Of table 0 rows [1, 1] and [2], of table 1 none and [0].
    tbe(torch.tensor([1, 1, 2, 0]), torch.tensor([0, 2, 3, 3, 4])).backward(gradient)
    for row, square, own in (
        (slice(4, 8), 1, 2 * gradient[0, :4]),
        (slice(8, 12), 2, gradient[1, :4]),
        (slice(12, 20), 3, gradient[1, 4:]),
    ):
        squares[square] += own.double().square().mean()
        weights[row] -= 0.05 / (squares[square].sqrt() + tbe.optimizer_args.eps) * own.double()
    torch.testing.assert_close(tbe.weights_host.detach().double(), weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tbe.momentum1_host.double(), squares, rtol=1e-5, atol=1e-6)


def test_a_lookup_without_gradients_updates_nothing() -> None:
    tbe = tables([(3, 4)])
    with torch.no_grad():
        assert not tbe(torch.tensor([1]), torch.tensor([0, 1])).requires_grad


def test_it_is_taken_where_it_is_faster_for_one_thread_and_where_fbgemm_has_other_code() -> None:
    memory = {"weights": (torch.zeros(8), [0]), "momentum1": (torch.zeros(2), [0])}
    taken = type(make_tbe([(2, 4)], memory, TableOptimizerConfig(), "fp32", "sum", CPU))
    assert taken is (RowwiseAdagradTbe if plain_loop_is_faster() else Tbe)
    half = memory | {"weights": (torch.zeros(8, dtype=torch.float16), [0])}
    assert type(make_tbe([(2, 4)], half, TableOptimizerConfig(), "fp16", "sum", CPU)) is Tbe
    del memory["momentum1"]
    assert type(make_tbe([(2, 4)], memory, TableOptimizerConfig(name="sgd"), "fp32", "sum", CPU)) is Tbe
    asked = "import torch; torch.set_num_threads(2)\nimport dlrm_autoshard.distributed.tables.rowwise_adagrad as r\n"
    subprocess.run([sys.executable, "-c", asked + "assert not r.plain_loop_is_faster()"], check=True, timeout=60)


def loops_taken(rank: int, world_size: int, fast: tuple[bool, ...]) -> bool:
    rowwise_adagrad.plain_loop_is_faster = lambda: fast[rank]  # type: ignore[assignment]
    bags = ShardedEmbeddingBags([TableConfig("a", 10, 8), TableConfig("b", 10, 8)])
    return isinstance(bags.sharded.storage.lookups[0].tbe, RowwiseAdagradTbe)


@pytest.mark.parametrize("fast", [(True, True), (True, False), (False, True)])
def test_ranks_on_other_cpus_take_one_loop(fast: tuple[bool, ...]) -> None:
    """Its last bits differ, so a table that moves from one to the other would be trained otherwise."""
    assert run_ranks(loops_taken, 2, fast) == [all(fast)] * 2


@pytest.mark.alone
def test_what_is_taken_takes_no_longer_than_the_other() -> None:
    """On an Intel CPU of 2023 a third of the time."""
    shapes = [(50_000, 32)] * 4
    batches = [drawn(np.random.default_rng(seed), shapes, 4096, False, torch.int64) for seed in range(4)]
    tbe, ratios = tables(shapes), []
    for gradient, *ids in batches * 4:
        seconds = []
        for pooled in (Tbe.forward(tbe, *ids), tbe(*ids)):
            started = time.perf_counter()
            pooled.backward(gradient)
            seconds.append(time.perf_counter() - started)
        ratios.append(seconds[1] / seconds[0])
    assert (median(ratios) < 1) == plain_loop_is_faster()
