"""The policy network: one logit for each device, the same function for every device and any number of tables.

DreamShard's shape (a table network summed over the device's tables, a network for its predicted costs, one logit),
with two things it lacked: the policy sees the unit that it is about to place, and what each device would cost with it.
It starts as the greedy on predicted cost (the device that would cost least is the likeliest) and learns to do better.

Axes: E episodes (any leading axes), D devices, F features of the MDP, H policy embedding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_autoshard.planner.cost_model import mlp
from dlrm_autoshard.planner.features import NUM_NETWORK
from dlrm_autoshard.planner.frozen import FrozenNet
from dlrm_autoshard.planner.mdp import NUM_FEATURES

HIDDEN = 16
EMBED_SCALE = 0.1
"""Sums of embeddings over dozens of tables stay of order one."""
COSTS_WITH_UNIT = slice(4, 8)
"""Among the MDP's features: the device's four stages with the unit that is about to be placed."""
GREEDINESS = 25.0
"""How much likelier the cheaper device is at first: e to this power per even share of cost (4% of it: e)."""


class DevicePolicy(nn.Module):
    def __init__(self, seed: int = 0, greediness: float = GREEDINESS) -> None:
        super().__init__()
        self.greediness = greediness
        generator = torch.Generator().manual_seed(seed)
        self.table_net = mlp([NUM_NETWORK, 64, HIDDEN], generator)
        self.device_net = mlp([NUM_FEATURES + 2 * HIDDEN, 64, 1], generator)
        last = self.device_net[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)

    def embed(self, features_UF: Tensor) -> Tensor:
        embedded: Tensor = self.table_net(features_UF)
        return embedded * EMBED_SCALE

    def logits(self, inputs_EDF: Tensor) -> Tensor:
        """[E, D] from [E, D, NUM_FEATURES + 2 HIDDEN]: the MDP's features, the device's units, the unit to place."""
        learned: Tensor = self.device_net(inputs_EDF).squeeze(-1)
        return learned - self.greediness * inputs_EDF[..., COSTS_WITH_UNIT].sum(dim=-1)

    def frozen(self) -> FrozenLogits:
        return FrozenLogits(self)


class FrozenLogits:
    """`DevicePolicy.logits` in numpy, for rollouts."""

    def __init__(self, policy: DevicePolicy) -> None:
        self.net = FrozenNet(policy.device_net)
        self.greediness = policy.greediness

    def __call__(self, inputs_EDF: np.ndarray) -> np.ndarray:
        greedy = self.greediness * inputs_EDF[..., COSTS_WITH_UNIT].sum(axis=-1)
        logits: np.ndarray = self.net(inputs_EDF)[..., 0] - greedy
        return logits
