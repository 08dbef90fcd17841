"""A dense part that is recorded once and replayed gives what one gives whose kernels are launched one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_autoshard.benchmarks.workloads import OurJob
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.recorded_passes import WARM_UP, RecordedPasses
from dlrm_autoshard.distributed.step import NotFinite
from dlrm_autoshard.tables import Shard
from tests.ranks import run_ranks
from tests.small_workload import SMALL, plan_of, trained

WIDTH = 5 * 8


class Again:
    """Stands for CUDA graphs: what was recorded is computed once more, into the tensors of the recording. As of a real
    one nothing is computed while it is made, so what it gave then is NaN."""

    def __init__(self, dense: DataParallelDense) -> None:
        self.dense, self.replays = dense, 0

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        before = self.dense.gradient.clone()
        result = function()
        self.dense.gradient.copy_(before)
        if result is not None:
            result.fill_(torch.nan)

        def replay() -> None:
            self.replays += 1
            made = function()
            if result is not None:
                result.copy_(made)

        return result, replay


def batches_of(rank: int, world_size: int) -> list[Batch]:
    """Most of one size; others that are smaller, padded, or with weights of the loss."""
    usual, fewer = (replace(SMALL, batch_size=size).batches(rank, world_size) for size in (24, 12))
    padded = replace(usual[0], size=usual[0].size - 1, global_size=usual[0].global_size - world_size)
    weighted = replace(usual[1], loss_weights_B=torch.linspace(0.5, 2, usual[1].size))
    return [padded, *usual, fewer[0], *usual, weighted, padded, *usual, *fewer, usual[2]]


def train(rank: int, world_size: int, ranks: str, recorded: bool, broken_off: tuple[int, ...]) -> dict[str, Any]:
    """broken_off: steps whose loss is said not to be finite."""
    batches = batches_of(rank, world_size)
    job = OurJob(SMALL, plan_of(ranks, world_size), rank, batches)
    again = Again(job.dense)
    if recorded:
        job.step.passes = RecordedPasses(job.model, WIDTH, autocast=False, record=again)
    finite = iter([number not in broken_off for number in range(len(batches))])
    job.step._all_finite = lambda loss: next(finite)
    losses = []
    for number in range(len(batches)):
        try:
            job.run(1, sample_every=3 if number % 4 == 0 else 0)
        except NotFinite:
            continue
        losses.append(job.dense.global_loss.clone())
    return {"replays": again.replays, **trained(job, losses)}


@pytest.mark.parametrize("world_size,ranks", [(1, "00000"), (2, "01101"), (3, "20200")])
@pytest.mark.parametrize("broken_off", [(), (1, WARM_UP, WARM_UP + 3)])
def test_no_bit_changes_whatever_batches_come(world_size: int, ranks: str, broken_off: tuple[int, ...]) -> None:
    launched = run_ranks(train, world_size, ranks, False, broken_off)
    recorded = run_ranks(train, world_size, ranks, True, broken_off)
    for one, other in zip(launched, recorded, strict=True):
        assert one.pop("replays") == 0 and other.pop("replays") > 4 * 4
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert torch.equal(value, other[key]), key


def test_batches_of_the_usual_size_are_replayed_and_others_are_not() -> None:
    (found,) = run_ranks(train, 1, "00000", True, ())
    batches = batches_of(0, 1)[WARM_UP:]
    usual = [batch for batch in batches if (batch.size, batch.loss_weights_B) == (24, None)]
    # The first is recorded, the second compared, and so replayed too.
    assert found["replays"] == 4 * (len(usual) - 1) < 4 * len(batches)


def test_what_is_not_finite_is_compared_when_it_is() -> None:
    assert run_ranks(replays_after_nan, 1) == [(0, 4, 8)]


def replays_after_nan(rank: int, world_size: int) -> tuple[int, ...]:
    job = one_rank()
    again = Again(job.dense)
    job.step.passes = RecordedPasses(job.model, WIDTH, autocast=False, record=again)
    job.run(WARM_UP + 1)
    kept, found = job.dense.flat.detach().clone(), [again.replays]
    job.dense.flat.data[0] = torch.nan
    job.run(1)
    for name, tensor in job.embeddings.storage.tensors(Shard("t_cat_0")).items():
        assert not torch.isfinite(tensor).all(), name
    found.append(again.replays)
    job.dense.flat.data.copy_(kept)
    for table in SMALL.tables:
        for tensor in job.embeddings.storage.tensors(table.shard).values():
            tensor.nan_to_num_()
    job.run(1)
    assert job.step.last_loss_finite
    return *found, again.replays


@pytest.mark.parametrize("case", ["stale", "refused"])
def test_a_dense_part_that_cannot_be_replayed_is_launched_and_told_of(case: str) -> None:
    (said, same) = run_ranks(unfit_dense_part, 1, case)[0]
    assert same
    (message,) = said
    expected = {"stale": "differ by", "refused": "stream is capturing"}[case]
    assert expected in message and "\n" not in message


class Stale(Again):
    """Of a recording that reads what it read when it was made."""

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        result, _ = super().__call__(function)
        return result, lambda: None


def unfit_dense_part(rank: int, world_size: int, case: str) -> tuple[list[str], bool]:
    def refused(function: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with `TORCH_USE_CUDA_DSA`")

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dlrm_autoshard").addHandler(handler)
    launched, other = one_rank(), one_rank()
    record = refused if case == "refused" else Stale(other.dense)
    other.step.passes = RecordedPasses(other.model, WIDTH, autocast=False, record=record)
    for job in (launched, other):
        job.run(WARM_UP + 4)
    return said, torch.equal(launched.dense.flat, other.dense.flat)


def test_what_a_pass_is_done_with_goes() -> None:
    """A graph of the last batch would hold its vectors, and on a GPU join a recording with the stream it ran on."""
    assert run_ranks(kept_after_a_step, 1) == [[]]


def kept_after_a_step(rank: int, world_size: int) -> list[str]:
    job = one_rank()
    job.step.passes = RecordedPasses(job.model, WIDTH, autocast=False, record=Again(job.dense))
    job.run(1)
    job.step._all_finite = lambda loss: False
    with pytest.raises(NotFinite):
        job.run(1)
    held = (Tensor, tuple, list, Batch)
    kept = {**vars(job.step.passes), **vars(job.step.passes._launched)}
    return [name for name, value in kept.items() if isinstance(value, held)]


def one_rank() -> OurJob:
    return OurJob(SMALL, plan_of("00000", 1), 0, SMALL.batches())
