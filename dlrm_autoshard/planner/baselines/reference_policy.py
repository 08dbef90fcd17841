"""The policy network of the published DreamShard, and REINFORCE's gradient for it, written out (see `by_hand`).

    training = PublishedPolicyTraining(policy)
    training.gradients(features, episodes, entropy_weight); training.adam.step(learning_rate); training.adam.finish()

Its log-probabilities are those over all devices, as in the reference, though sampling was masked by memory.

Axes: T tables in the order of placing, E episodes, D devices; embeddings of 32 numbers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_autoshard.planner.baselines.reference_costs import HEADS
from dlrm_autoshard.planner.by_hand import FlatAdam, Mlp
from dlrm_autoshard.planner.cost_model import mlp
from dlrm_autoshard.planner.features import NUM_PUBLISHED
from dlrm_autoshard.planner.masked import logit_gradient

EMBED = 32


class PublishedPolicy(nn.Module):
    """21-128-32 a table, summed over a device; its three costs through 3-64-32; one logit a device."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.table_net = mlp([NUM_PUBLISHED, 128, EMBED], generator)
        self.cost_net = mlp([HEADS, 64, 32], generator)
        self.logit = mlp([64, 1], generator)

    def logits(self, devices: Tensor, costs: Tensor) -> Tensor:
        both = torch.cat([devices, self.cost_net(costs)], dim=-1)
        logits: Tensor = self.logit(both).squeeze(-1)
        return logits


@dataclass(frozen=True)
class Episodes:
    order: np.ndarray
    actions_TE: np.ndarray
    costs_TED3: np.ndarray
    predicted_E: np.ndarray


class PublishedPolicyTraining:
    def __init__(self, policy: PublishedPolicy) -> None:
        groups = [[*part.parameters()] for part in (policy.table_net, policy.cost_net, policy.logit)]
        self.adam = FlatAdam([p for group in groups for p in group])
        ends = np.cumsum([0, *(len(group) for group in groups)])
        self.table_net, self.cost_net, self.logit = (
            Mlp(self.adam.arrays[a:b], self.adam.gradients[a:b]) for a, b in itertools.pairwise(ends)
        )

    def gradients(self, features: np.ndarray, episodes: Episodes, entropy_weight: float) -> None:
        """features: [T + 1, 21]; the last row stands for an empty device."""
        reward_E = -episodes.predicted_E.astype(np.float64)
        advantage_E = (reward_E - reward_E.mean()) / (reward_E.std(ddof=1) + 1e-9)
        embedding = self.table_net.forward(features)
        placed = episodes.actions_TE[..., None] == np.arange(episodes.costs_TED3.shape[2])
        held = np.zeros((*placed.shape, EMBED), dtype=np.float32)  # what was on each device before the step
        np.cumsum((placed[..., None] * embedding[episodes.order][:, None, None, :])[:-1], axis=0, out=held[1:])
        empty = (placed.cumsum(axis=0) - placed == 0)[..., None]
        inputs = np.concatenate(
            [
                np.where(empty, embedding[-1], held).reshape(-1, EMBED),
                self.cost_net.forward(episodes.costs_TED3.reshape(-1, HEADS)),
            ],
            axis=1,
        )
        logits = self.logit.forward(inputs).reshape(placed.shape)
        grad = logit_gradient(logits, np.ones_like(placed), placed, advantage_E, entropy_weight)

        grad_inputs = self.logit.backward(grad.reshape(-1, 1))
        self.cost_net.backward(grad_inputs[:, EMBED:], to_inputs=False)
        grad_held = grad_inputs[:, :EMBED].reshape(held.shape)
        grad_embedding = np.zeros_like(embedding)
        grad_embedding[-1] = (grad_held * empty).sum(axis=(0, 1, 2))
        grad_held = grad_held * ~empty
        after = grad_held[::-1].cumsum(axis=0)[::-1] - grad_held  # a table is held in all steps after its own
        grad_embedding[episodes.order] = (after * placed[..., None]).sum(axis=(1, 2))
        self.table_net.backward(grad_embedding, to_inputs=False)
