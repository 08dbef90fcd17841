"""The planner's own network: torch's outputs, gradients and Adam are the reference."""

from __future__ import annotations

import copy
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dlrm_autoshard.planner.costs.mlp import Adam, Mlp, load_weights, weights_to_json


def in_torch(net: Mlp) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in zip(net.parameters[::2], net.parameters[1::2], strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.weight.data, linear.bias.data = torch.from_numpy(weight.copy()), torch.from_numpy(bias.copy())
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*(layers if net.final_relu else layers[:-1]))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(1, 6), st.booleans(), st.integers(0, 99))
def test_outputs_gradients_and_updates_are_torchs(sizes: list[int], rows: int, final_relu: bool, seed: int) -> None:
    generator = np.random.default_rng(seed)
    net = Mlp(sizes, generator, final_relu=final_relu)
    twin = in_torch(net)
    adam, optimizer = Adam(net), torch.optim.Adam(twin.parameters(), lr=1e-2)
    for _ in range(3):
        inputs = generator.standard_normal((2, rows, sizes[0])).astype(np.float32)
        wanted = generator.standard_normal((2, rows, sizes[-1])).astype(np.float32)
        outputs, backward = net.forward(inputs)
        of_inputs = backward(wanted)
        adam.step(1e-2)
        theirs = torch.from_numpy(inputs).requires_grad_()
        expected = twin(theirs)
        optimizer.zero_grad()
        (expected * torch.from_numpy(wanted)).sum().backward()
        optimizer.step()
        assert theirs.grad is not None
        np.testing.assert_allclose(outputs, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(of_inputs, theirs.grad.numpy(), rtol=1e-4, atol=1e-5)
    for ours, parameter in zip(net.parameters, twin.parameters(), strict=True):
        np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=1e-3, atol=2e-4)


def test_weights_travel_as_json_under_torchs_names() -> None:
    net, other = (Mlp([3, 5, 2], np.random.default_rng(seed)) for seed in (0, 1))
    record = json.loads(json.dumps(weights_to_json({"a_net": net})))
    in_torch(net).load_state_dict({name.removeprefix("a_net."): torch.tensor(v) for name, v in record.items()})
    load_weights({"a_net": other}, record)
    inputs = np.ones((1, 3), dtype=np.float32)
    np.testing.assert_array_equal(net(inputs), other(inputs))
    with pytest.raises(ValueError, match=r"'a_net.0.weight' must be numbers of shape \[4, 3\]"):
        load_weights({"a_net": Mlp([3, 4, 2], np.random.default_rng(0))}, record)


def test_a_copy_is_trained_on_its_own_and_two_optimizers_train_one_network() -> None:
    net, inputs = Mlp([3, 2], np.random.default_rng(0)), np.ones((1, 3), dtype=np.float32)
    first, second, twin = Adam(net), Adam(net), copy.deepcopy(net)
    seen = [net(inputs)]
    for adam in (first, second, first):
        net.forward(inputs)[1](np.ones((1, 2), dtype=np.float32))
        adam.step(0.1)
        seen.append(net(inputs))
    assert all((later < earlier).all() for earlier, later in itertools.pairwise(seen))
    np.testing.assert_array_equal(twin(inputs), seen[0])
