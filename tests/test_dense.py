"""The data-parallel dense part beside torch's own optimizers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm_autoshard.config import DenseOptimizerConfig
from dlrm_autoshard.distributed.dense import DataParallelDense
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
    dense = DataParallelDense(module, config, group, torch.device("cpu"))
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
    dense = DataParallelDense(module, config, group, torch.device("cpu"))
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
