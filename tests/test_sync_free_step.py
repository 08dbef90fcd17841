"""An unsampled step on a device never makes the host wait for it.

Without a GPU a stand-in counts: tensors that streams copy "to the device", and all that is computed from them, are
known as the device's; whoever reads a value of one on the host is caught.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dlrm_autoshard.benchmarks.workloads import W_EMB
from dlrm_autoshard.config import DenseOptimizerConfig, TableOptimizerConfig, TablesConfig
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.lookups import EmbeddingBags, _Halves
from dlrm_autoshard.distributed.ranks.groups import new_group
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.distributed.step import TrainStep
from dlrm_autoshard.model.dlrm import DLRM
from dlrm_autoshard.plan import ShardingPlan
from tests.ranks import run_ranks

SMALL = replace(W_EMB, rows=(50, 300, 7, 1000, 20), pooling=(2.0, 0.5, 3.0, 1.0, 4.0), batch_size=24)
SMALL = replace(SMALL, num_batches=3, dim=8, bottom=(8,), top=(16, 1))
READS_A_VALUE = {
    *("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "is_nonzero"),
    *("equal", "allclose", "masked_select", "unique", "synchronize"),
}


IN_BACKWARD = (
    *((_Halves, "send_gradients"), (_Halves, "receive_gradients"), (EmbeddingBags, "_updated")),
    (DataParallelDense, "gradients_made"),
)


class DeviceStandIn(TorchFunctionMode):
    """Which tensors are the device's, and who read one."""

    def __init__(self) -> None:
        super().__init__()
        self._on_device: dict[int, weakref.ref[Tensor]] = {}
        self.readers: list[str] = []

    def own(self, tensor: Tensor) -> Tensor:
        self._on_device[id(tensor)] = weakref.ref(tensor)
        return tensor

    def owns(self, value: object) -> bool:
        known = self._on_device.get(id(value))
        return known is not None and known() is value

    def watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The same, and what it is given is the device's: in a backward pass torch has this mode off."""

        def called(*args: Any) -> Any:
            for tensor in (value for value in args if isinstance(value, Tensor)):
                self.own(tensor)
            with self:
                return method(*args)

        return called

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        from_device = any(self.owns(leaf) for leaf in tree_leaves((args, kwargs)))
        name = getattr(function, "__name__", "")
        to_host = name == "to" and any(str(leaf) == "cpu" for leaf in tree_leaves((args[1:], kwargs)))
        caller = traceback.extract_stack()[-2]
        # What is asked of the device is CPU's: the stop flag is read at once there, two steps late on a GPU.
        if from_device and (name in READS_A_VALUE or to_host) and caller.name != "read_late":
            self.readers.append(f"{name} at {caller}")
        result = function(*args, **kwargs)
        if from_device:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.own(leaf)
        return result


class StreamsStandIn:
    def __init__(self, device: DeviceStandIn) -> None:
        self._device = device

    def copy(self, host: Tensor) -> Tensor:
        return self._device.own(host.clone())

    @contextlib.contextmanager
    def travel(self) -> Iterator[None]:
        yield

    def join(self, *made_beside: Tensor) -> None:
        assert all(self._device.owns(tensor) for tensor in made_beside)


def make_step(rank: int, ranks: str, streams: Any, world_size: int) -> TrainStep:
    group = dist.group.WORLD
    assert group is not None
    embeddings = ShardedEmbeddings(
        SMALL.tables,
        ShardingPlan({t.name: int(r) for t, r in zip(SMALL.tables, ranks, strict=True)}, world_size),
        TablesConfig(optimizer=TableOptimizerConfig(name="rowwise_adagrad", lr=0.1)),
        rank=rank, group=group, id_group=new_group(), device=torch.device("cpu"), shared_memory=False,
        streams=streams,
    )  # fmt: skip
    model = DLRM(SMALL.num_dense, embeddings.output_tables, SMALL.model, seed=0)
    config = DenseOptimizerConfig(name="sgd", lr=0.1)
    dense = DataParallelDense(model, config, group, torch.device("cpu"), average=False, shared_memory=False)
    clock = StageClock(torch.device("cpu"), new_group())
    return TrainStep(model, dense, EmbeddingBags(embeddings, clock, average=False))


def results_of(step: TrainStep, rank: int) -> dict[str, Tensor]:
    result = {"dense": step.dense.flat.detach().clone(), "loss": step.dense.global_loss.clone()}
    for name in step.bags.sharded.plan.shards_on(rank):
        result |= {f"{name}.{k}": v.detach().clone() for k, v in step.bags.sharded.storage.tensors(name).items()}
    return result


def train(rank: int, world_size: int, ranks: str, on_device: bool) -> tuple[dict[str, Tensor], list[str]]:
    device = DeviceStandIn()
    step = make_step(rank, ranks, StreamsStandIn(device) if on_device else None, world_size)
    batches = SMALL.batches(rank, world_size)
    for owner, name in IN_BACKWARD if on_device else ():
        setattr(owner, name, device.watched(getattr(owner, name)))
    with device if on_device else contextlib.nullcontext():
        for tensor in (step.dense.flat, step.dense.gradient):
            device.own(tensor)
        for _, ids in step.bags.ahead(itertools.islice(itertools.cycle(batches), 4), lambda batch: batch):
            step.run(ids, 1.0, 0.1)
    assert step.bags.sharded.updates == 4
    return results_of(step, rank), device.readers


@pytest.mark.parametrize("world_size,ranks", [(2, "01101"), (2, "11111"), (3, "20200"), (1, "00000")])
def test_no_step_reads_a_value_from_the_device(world_size: int, ranks: str) -> None:
    there = run_ranks(train, world_size, ranks, True)
    for rank, ((values, readers), (expected, _)) in enumerate(
        zip(there, run_ranks(train, world_size, ranks, False), strict=True)
    ):
        assert not readers, f"rank {rank}: {readers}"
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[key], expected[key]) for key in values)


def reads_of_a_batch_on_the_device(rank: int, world_size: int) -> int:
    """As on the host: the batch copied first; its counts, the other ranks' notes and their counts read back."""
    device = DeviceStandIn()
    embeddings = make_step(rank, "01101", None, world_size).bags.sharded
    batch = SMALL.batches(rank, world_size)[0]
    with device:
        lengths_TB, values_N = device.own(batch.lengths_TB.clone()), device.own(batch.values_N.clone())
        embeddings.distribute(replace(batch, lengths_TB=lengths_TB, values_N=values_N)).finish()
    return len(device.readers)


def test_the_stand_in_catches_sizes_that_are_read_back() -> None:
    assert run_ranks(reads_of_a_batch_on_the_device, 2) == [3, 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_step_synchronises_a_gpu() -> None:
    run_ranks(steps_on_a_gpu, 1)


def steps_on_a_gpu(rank: int, world_size: int) -> None:
    group, device = new_group(backend="nccl"), torch.device("cuda", 0)
    config = TablesConfig(optimizer=TableOptimizerConfig(name="rowwise_adagrad", lr=0.1))
    plan = ShardingPlan({t.name: 0 for t in SMALL.tables}, 1)
    embeddings = ShardedEmbeddings(SMALL.tables, plan, config, rank=0, group=group, id_group=new_group(), device=device)
    model = DLRM(SMALL.num_dense, embeddings.output_tables, SMALL.model, seed=0)
    dense = DataParallelDense(model, DenseOptimizerConfig(name="sgd", lr=0.1), group, device, average=False)
    step = TrainStep(model, dense, EmbeddingBags(embeddings, StageClock(device, group), average=False))
    batches = step.bags.ahead(itertools.cycle(SMALL.batches(0, 1)), lambda batch: batch)
    step.run(next(batches)[1], 1.0, 0.1)
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(4):
        step.run(next(batches)[1], 1.0, 0.1)
    torch.cuda.set_sync_debug_mode("default")
