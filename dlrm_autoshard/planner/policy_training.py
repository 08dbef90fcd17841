"""REINFORCE's gradient for the device policy, written out (see `by_hand`); a test holds it to torch's.

    training = PolicyTraining(policy)
    training.gradients(rollout, advantage_E, entropy_weight)     # into training.adam
    training.adam.step(learning_rate); training.adam.finish()

The loss is minus the mean over episodes of advantage x log-probability of the episode's actions, minus the entropy of a
step times its weight. Probabilities are those under the mask that the rollout sampled with.

Axes: U units in the order of placing, E episodes, D devices, F features, H policy embedding, T tables.
"""

from __future__ import annotations

import numpy as np

from dlrm_autoshard.planner.by_hand import FlatAdam, Mlp
from dlrm_autoshard.planner.masked import logit_gradient
from dlrm_autoshard.planner.mdp import NUM_FEATURES, Rollout
from dlrm_autoshard.planner.policy import COSTS_WITH_UNIT, EMBED_SCALE, HIDDEN, DevicePolicy

HELD = slice(NUM_FEATURES, NUM_FEATURES + HIDDEN)
UNIT = slice(NUM_FEATURES + HIDDEN, NUM_FEATURES + 2 * HIDDEN)


class PolicyTraining:
    def __init__(self, policy: DevicePolicy) -> None:
        self.adam = FlatAdam([*policy.table_net.parameters(), *policy.device_net.parameters()])
        split = len(list(policy.table_net.parameters()))
        arrays, gradients = self.adam.arrays, self.adam.gradients
        self.table_net = Mlp(arrays[:split], gradients[:split])
        self.device_net = Mlp(arrays[split:], gradients[split:])
        self.greediness = policy.greediness

    def gradients(self, rollout: Rollout, advantage_E: np.ndarray, entropy_weight: float) -> None:
        mdp = rollout.mdp
        steps, episodes, devices = rollout.legal.shape
        unit_of_T = mdp.unit_of_T.numpy()
        embedded_TH = self.table_net.forward(mdp.features_TF.numpy()) * np.float32(EMBED_SCALE)
        unit_UH = np.zeros((steps, HIDDEN), dtype=np.float32)
        np.add.at(unit_UH, unit_of_T, embedded_TH)
        placed_UED = rollout.actions[..., None] == np.arange(devices)
        inputs = np.empty((steps, episodes, devices, UNIT.stop), dtype=np.float32)
        inputs[..., :NUM_FEATURES] = rollout.features
        inputs[..., UNIT] = unit_UH[:, None, None, :]
        held = inputs[..., HELD]  # what was on each device before the step
        held[0] = 0
        np.cumsum((placed_UED[..., None] * unit_UH[:, None, None, :])[:-1], axis=0, out=held[1:])

        logits = self.device_net.forward(inputs.reshape(-1, UNIT.stop)).reshape(rollout.legal.shape)
        logits -= self.greediness * rollout.features[..., COSTS_WITH_UNIT].sum(axis=-1)
        grad = logit_gradient(logits, rollout.legal, placed_UED, advantage_E, entropy_weight)

        grad_inputs = self.device_net.backward(grad.reshape(-1, 1)).reshape(inputs.shape)
        grad_held = grad_inputs[..., HELD]
        after = grad_held[::-1].cumsum(axis=0)[::-1] - grad_held  # a unit is held in all steps after its own
        grad_UH = grad_inputs[..., UNIT].sum(axis=(1, 2)) + (after * placed_UED[..., None]).sum(axis=(1, 2))
        self.table_net.backward(grad_UH[unit_of_T] * np.float32(EMBED_SCALE), to_inputs=False)
