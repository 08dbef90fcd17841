"""The data-parallel dense part beside torch's own optimizers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dlrm_autoshard as das
from dlrm_autoshard.config import DenseOptimizerConfig
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.lookup.exchange import Pending
from dlrm_autoshard.errors import UserError
from tests.ranks import run_ranks

OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


def step_with_a_frozen_layer(rank: int, world_size: int, name: Any) -> tuple[dict[str, Tensor], list[str]]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    module[0].requires_grad_(False)
    plain = deepcopy(module)
    group = dist.group.WORLD
    assert group is not None
    config = DenseOptimizerConfig(name=name, lr=0.1, weight_decay=0.1)
    dense = DataParallelDense(module, config, group, torch.device("cpu"), average=False)
    dense.broadcast()
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS[name](trained, lr=0.1, weight_decay=0.1, eps=config.eps) if name != "sgd" else None
    optimizer = optimizer or OPTIMIZERS[name](trained, lr=0.1, weight_decay=0.1)
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        dense.zero_gradient()
        loss = module(inputs).square().mean() / world_size
        loss.backward()
        dense.start_all_reduce(loss.detach()).wait()
        dense.step(1.0)
        optimizer.zero_grad()
        plain(inputs).square().mean().backward()
        optimizer.step()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], value)
    return dict(module[0].named_parameters()), [key for key, _ in dense.named_tensors()]


def steps_with_momentum_and_clipping(rank: int, world_size: int, seed: int) -> tuple[list[float], set[str]]:
    """Lengths of the gradients of all samples, before they are cut."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    plain, group, norms = deepcopy(module), dist.group.WORLD, list[float]()
    assert group is not None
    config = DenseOptimizerConfig(name="sgd", lr=0.1, momentum=0.9, max_gradient_norm=0.2)
    dense = DataParallelDense(module, config, group, torch.device("cpu"), average=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    for _ in range(8):
        dense.zero_gradient()
        loss = module(inputs[rank::world_size]).square().sum() / len(inputs)  # each rank its samples
        loss.backward()
        dense.start_all_reduce(loss.detach()).wait()
        dense.step(1.0)
        optimizer.zero_grad()
        plain(inputs).square().mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.2)))
        optimizer.step()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], value)
    return norms, {key for key, _ in dense.named_tensors()}


def test_momentum_and_the_length_of_all_ranks_gradient_are_torchs_of_one_process() -> None:
    for norms, saved in run_ranks(steps_with_momentum_and_clipping, 2, 5):
        assert max(norms) > 0.2 > min(norms), "some are cut and some are not"
        assert "dense_optimizer.0.weight.momentum_buffer" in saved


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_parameters_stay_as_they_are_and_in_checkpoints(name: str) -> None:
    """Also under weight decay, which would shrink whatever the optimizer is given."""
    torch.manual_seed(3)
    first = nn.Linear(4, 3)
    for kept, saved in run_ranks(step_with_a_frozen_layer, 2, name):
        assert torch.equal(kept["weight"], first.weight) and torch.equal(kept["bias"], first.bias)
        assert {"dense.0.weight", "dense.0.bias", "dense.2.weight", "dense.2.bias"} <= set(saved)
        assert not [key for key in saved if key.startswith("dense_optimizer.0")]


# In anybody's loop ---------------------------------------------------------------------------------------------------


def tower_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def beside_ddp(rank: int, world_size: int, how: str) -> dict[str, Tensor]:
    """Weights after steps from rank 0's: by us, or by DDP and torch's optimizer."""
    module = tower_of(rank)
    if how == "ddp":
        replica = DistributedDataParallel(module, forward_sync_buffers=False)
        optimizer = torch.optim.Adagrad(replica.parameters(), lr=0.1, fused=True)
        for step in range(4):
            optimizer.zero_grad()
            replica(inputs_of(rank, step)).square().mean().backward()
            optimizer.step()
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        del replica
        return weights
    dense = das.DataParallelDense(module, torch.optim.Adagrad, lr=0.1, fused=True)
    own = torch.optim.Adagrad(module.parameters(), lr=0.1, fused=True)
    for step in range(4):
        loss = module(inputs_of(rank, step)).square().mean()
        if how == "late":
            loss.backward()
        elif how == "left out":
            dense.backward(loss)
            dense.backward(module(inputs_of(rank, step)).square().mean())
        elif how == "none":
            module.zero_grad()
            dense.backward(loss)
        else:
            dense.backward(loss)
        if how == "own optimizer":
            dense.all_reduce()
            own.step()
            own.zero_grad()
        else:
            dense.step()
        if how == "":
            mean = torch.stack([loss.detach()])
            dist.all_reduce(mean)
            assert torch.equal(mean[0] / world_size, dense.global_loss)
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_it_does_what_ddp_and_an_optimizer_do_to_the_bit() -> None:
    expected = run_ranks(beside_ddp, 2, "ddp")
    for how in ("", "late", "none", "own optimizer"):
        for found, same in zip(run_ranks(beside_ddp, 2, how), expected, strict=True):
            assert all(torch.equal(found[name], same[name]) for name in same), how
    for found, same in zip(run_ranks(beside_ddp, 2, "left out"), expected, strict=True):
        assert all(torch.equal(found[name], same[name]) for name in same if "running" not in name and "num" not in name)


def when_it_starts(rank: int, world_size: int) -> tuple[list[str], str]:
    """Whether the all-reduce waits for the last gradient, and what a gradient that comes after it is answered."""
    module = tower_of(0)
    dense = das.DataParallelDense(module, torch.optim.SGD, lr=0.1)
    events: list[str] = []
    start = dense.start_all_reduce

    def noted(local_loss: Tensor) -> Pending:
        events.append("sum")
        return start(local_loss)

    dense.start_all_reduce = noted  # type: ignore[method-assign]
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda _, name=name: events.append(name))
    module(inputs_of(rank, 0)).sum().backward()  # one of two losses: no sum yet
    assert "sum" not in events
    dense.backward(module(inputs_of(rank, 1)).sum())
    found = list(events)
    with pytest.raises(UserError) as caught:
        module(inputs_of(rank, 2)).sum().backward()
    return found, str(caught.value)


def test_the_sum_over_ranks_starts_with_the_last_gradient() -> None:
    for events, late in run_ranks(when_it_starts, 2):
        assert len(events) == 13 and events.index("sum") == 12 and "arrived after the sum over ranks had begun" in late


def unlike(rank: int, world_size: int, how: str) -> str:
    module = nn.Linear(3, 2 + (rank if how == "shape" else 0))
    with pytest.raises(UserError) as caught:
        das.DataParallelDense(module.half() if how == "half" else module, torch.optim.SGD, lr=0.1)
    return str(caught.value)


@pytest.mark.parametrize(("how", "said"), [("shape", "rank 1's module has ('weight', (3, 3)"), ("half", "not float32")])
def test_modules_that_cannot_be_replicas_are_refused_on_all_ranks(how: str, said: str) -> None:
    assert all(said in one for one in run_ranks(unlike, 2, how))
