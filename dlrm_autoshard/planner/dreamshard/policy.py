"""The policy network: one logit per device, by the same function for each device and any number of tables.

DreamShard's shape (a table network summed over the device's tables, a network for its predicted costs, one logit),
with two things it lacked: the policy sees the unit that it is about to place, and what each device would cost with it.
It starts as `greedy_on_cost` (the device whose load rises least is the likeliest) and learns to do better; the one
that the package ships was trained by `python -m dlrm_autoshard.planner.dreamshard.train_policy`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_autoshard.planner.costs.features import NUM_NETWORK
from dlrm_autoshard.planner.costs.mlp import Backward, Mlp, load_weights, weights_to_json
from dlrm_autoshard.planner.dreamshard.masked import logit_gradient
from dlrm_autoshard.planner.dreamshard.mdp import NUM_FEATURES, RISE, Rollout

SHIPPED = Path(__file__).parent / "policy.json"
HIDDEN = 16
EMBED_SCALE = np.float32(0.1)
"""Sums of embeddings over dozens of tables stay of order one."""
GREEDINESS = 4.0
"""How much likelier a device is at first than one whose load rises e times as much: e to this power."""
HELD = slice(NUM_FEATURES, NUM_FEATURES + HIDDEN)
UNIT = slice(NUM_FEATURES + HIDDEN, NUM_FEATURES + 2 * HIDDEN)


class DevicePolicy:
    """DreamShard's policy: a device network on top of a table network."""

    def __init__(self, seed: int = 0, greediness: float = GREEDINESS) -> None:
        self.greediness = greediness
        generator = np.random.default_rng(seed)
        self.table_net = Mlp([NUM_NETWORK, 64, HIDDEN], generator)
        self.device_net = Mlp([NUM_FEATURES + 2 * HIDDEN, 64, 1], generator)
        self.device_net.parameters[-2][:] = 0
        self.nets = {"table_net": self.table_net, "device_net": self.device_net}

    def embed(self, features_TF: np.ndarray) -> tuple[np.ndarray, Backward]:
        """Returns table embeddings [T, H]. A unit's is the sum over its tables, a device's over its units."""
        embedded, net_backward = self.table_net.forward(features_TF)
        return embedded * EMBED_SCALE, lambda grad: net_backward(grad * EMBED_SCALE, to_inputs=False)

    def logits(self, inputs_EDF: np.ndarray) -> tuple[np.ndarray, Backward]:
        """Returns logits [E, D] from [E, D, NUM_FEATURES + 2 HIDDEN]: the MDP's features, the device, the unit."""
        learned, net_backward = self.device_net.forward(inputs_EDF)
        return learned[..., 0] - self.greediness * inputs_EDF[..., RISE], lambda grad: net_backward(grad[..., None])

    def reinforce(self, rollout: Rollout, advantage_E: np.ndarray, entropy_weight: float) -> None:
        """Adds REINFORCE's gradient to the networks; `logit_gradient` has the loss."""
        mdp, actions = rollout.mdp, rollout.actions
        logits, logits_backward = self.logits(rollout.inputs)
        placed_UED = actions[..., None] == np.arange(logits.shape[-1])
        grad = logits_backward(logit_gradient(logits, rollout.legal, placed_UED, advantage_E, entropy_weight))
        grad_held = grad[..., HELD]
        after = grad_held[::-1].cumsum(axis=0)[::-1] - grad_held  # a unit is held in all steps after its own
        grad_UH = grad[..., UNIT].sum(axis=(1, 2)) + (after * placed_UED[..., None]).sum(axis=(1, 2))
        _, embed_backward = self.embed(mdp.features_TF)
        embed_backward(grad_UH[mdp.step_of_T])

    @staticmethod
    def shipped() -> DevicePolicy:
        policy = DevicePolicy()
        policy.load_json(_shipped_weights())
        return policy

    def to_json(self) -> dict[str, Any]:
        return weights_to_json(self.nets)

    def load_json(self, record: Mapping[str, Any]) -> None:
        load_weights(self.nets, record)


@lru_cache
def _shipped_weights() -> dict[str, Any]:
    weights: dict[str, Any] = json.loads(SHIPPED.read_text())["weights"]
    return weights
