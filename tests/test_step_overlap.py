"""Overlap and the way by which tensors travel change when things happen, not a single bit of what comes out."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_autoshard.benchmarks.workloads import OurJob
from dlrm_autoshard.distributed.lookup.shared_memory import RankGone, connect
from dlrm_autoshard.model.interaction import DotInteraction, with_dense
from tests.ranks import run_ranks
from tests.small_workload import SMALL, plan_of, trained


def train(rank: int, world_size: int, ranks: str, overlap: bool, shared_memory: bool) -> dict[str, torch.Tensor]:
    """Losses, dense weights, and this rank's tables after six steps, every third of them sampled."""
    plan, batches = plan_of(ranks, world_size), SMALL.batches(rank, world_size)
    job = OurJob(SMALL, plan, rank, batches, overlap=overlap, shared_memory=shared_memory)
    losses = []
    for _ in range(2):
        job.run(3, sample_every=3)
        losses.append(job.dense.global_loss.clone())
    return trained(job, losses)


def merged(results: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    for result in results[1:]:
        assert torch.equal(result["dense"], results[0]["dense"])
        assert torch.equal(result["losses"], results[0]["losses"])
    return {key: value for result in results for key, value in result.items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(value, b[key]), key


@pytest.mark.parametrize("world_size,ranks", [(1, "00000"), (2, "01101"), (3, "20200")])
def test_overlap_changes_no_bit(world_size: int, ranks: str) -> None:
    with_overlap = merged(run_ranks(train, world_size, ranks, True, True))
    assert_equal(with_overlap, merged(run_ranks(train, world_size, ranks, False, True)))


@pytest.mark.parametrize("overlap", [True, False])
def test_shared_memory_and_the_group_carry_the_same_bits(overlap: bool) -> None:
    """Two ranks: with more, the order in which gloo adds up gradients is its own."""
    through_memory = merged(run_ranks(train, 2, "01101", overlap, True))
    assert_equal(through_memory, merged(run_ranks(train, 2, "01101", overlap, False)))


def test_placement_changes_no_bit_of_a_whole_run() -> None:
    first = merged(run_ranks(train, 2, "01101", True, True))
    for ranks in ("11111", "10010"):
        assert_equal(first, merged(run_ranks(train, 2, ranks, True, True)))


def collectives(rank: int, world_size: int) -> bool:
    """Sums and exchanges of random sizes, zero among them, waited for in another order than started."""
    assert dist.group.WORLD is not None
    link = connect(dist.group.WORLD)
    assert link is not None
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64) * 5:
        counts = torch.randint(0, 2000, (world_size,), generator=generator)
        counts[torch.randint(0, world_size, (1,), generator=generator)] = 0
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        splits, arrivals = counts.tolist(), arriving.tolist()
        sent = (100 * torch.randn(sum(splits), generator=generator)).to(dtype)
        expected, received = sent.new_empty(sum(arrivals)), sent.new_empty(sum(arrivals))
        dist.all_to_all_single(expected, sent, arrivals, splits)
        values = torch.randint(-99, 99, (1001,), generator=generator).float()
        total = values.clone()
        dist.all_reduce(total)
        exchange = link.all_to_all("vectors", received, sent, arrivals, splits)
        reduction = link.all_reduce(values)
        assert torch.equal(reduction(), total)
        assert torch.equal(exchange(), expected)
    return True


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_shared_memory_does_what_the_group_does(world_size: int) -> None:
    assert all(run_ranks(collectives, world_size))


def survive(rank: int, world_size: int, folder: str) -> str:
    assert dist.group.WORLD is not None
    link = connect(dist.group.WORLD)
    assert link is not None
    values = torch.ones(8)
    link.all_reduce(values)()
    if rank == 1:
        Path(folder, "about_to_die").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankGone, match="rank 1 has ended"):
        link.all_reduce(values)()
    Path(folder, "noticed").touch()
    return "noticed"


def test_a_rank_that_dies_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 1 died"):
        run_ranks(survive, 2, str(tmp_path))
    assert (tmp_path / "about_to_die").exists()


@pytest.mark.parametrize("num_tables", [1, 2, 3, 4, 26])
def test_dot_interaction_and_its_gradient(num_tables: int) -> None:
    """Against the pairs taken one by one, by autograd, in double precision."""
    generator = torch.Generator().manual_seed(num_tables)
    bottom = torch.randn(5, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    vectors = torch.randn(5, num_tables, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    interaction = DotInteraction(num_tables, 8)
    rows = [bottom, *vectors.unbind(1)]
    pairs = [(rows[i] * rows[j]).sum(1, keepdim=True) for i in range(len(rows)) for j in range(i)]
    expected = torch.cat([bottom, *pairs], 1)
    margin = torch.nn.functional.pad(vectors, (0, 0, 1, interaction.padding))
    actual = interaction(with_dense(bottom, margin.flatten(1), interaction.padding))
    assert actual.shape[1] == interaction.out_features
    torch.testing.assert_close(actual, expected)
    gradient = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(actual, (bottom, vectors), gradient),
        torch.autograd.grad(expected, (bottom, vectors), gradient),
    )
