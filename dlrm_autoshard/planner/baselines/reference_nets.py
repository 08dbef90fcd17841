"""The networks of the reference DreamShard (Zha et al., NeurIPS 2022, and its code), with their losses' gradients.

    net.gradients(features_RF, kernels, placements)      # the sum of four mean squared errors
    policy.gradients(features_RF, episodes, 1e-3)        # REINFORCE, log-probabilities over all devices

Sizes, ReLUs (also after table and cost embeddings) and the uniform initialisation are the published code's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dlrm_autoshard.planner.costs.features import NUM_RAW
from dlrm_autoshard.planner.costs.mlp import Backward, Mlp
from dlrm_autoshard.planner.dreamshard.masked import logit_gradient

# Axes: R tables of all tasks (the last row, all zero, is what an empty device holds), B of a batch, D devices, T tables
# in the order of placing, E episodes, 3 heads, 32 numbers an embedding.

HEADS = ("fwd_compute", "bwd_compute", "bwd_comms")
EMBED = 32


@dataclass(frozen=True)
class Kernels:
    """Devices of measured placements: 1 where a device has a table [B, R], and the ms of its three heads [B, 3]."""

    owned_BR: np.ndarray
    heads_B3: np.ndarray


@dataclass(frozen=True)
class Placements:
    """Measured placements: which device has which tables [B, D, R], with zeros where a task has fewer devices, and
    the overall ms [B]."""

    owned_BDR: np.ndarray
    overall_B: np.ndarray


class ReferenceCostNet:
    """Maps each table through 21-128-32, sums over a device, and each head through 32-64-1. The overall cost is
    32-64-1 of the maximum over devices."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.table_net = _table_net(generator)
        self.head_nets = {name: Mlp([EMBED, 64, 1], generator, uniform=True) for name in HEADS}
        self.overall_net = Mlp([EMBED, 64, 1], generator, uniform=True)
        self.nets = {"table_net": self.table_net, **self.head_nets, "overall_net": self.overall_net}

    def heads(self, devices: np.ndarray) -> tuple[np.ndarray, Backward]:
        """Returns ms [..., 3] from device embeddings [..., 32]."""
        results = [net.forward(devices) for net in self.head_nets.values()]

        def backward(grad: np.ndarray) -> np.ndarray:
            parts = [back(grad[..., i : i + 1]) for i, (_, back) in enumerate(results)]
            return parts[0] + parts[1] + parts[2]

        return np.concatenate([out for out, _ in results], axis=-1), backward

    def overall(
        self, devices_BDE: np.ndarray, exists_BD: np.ndarray | None = None
    ) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """Returns overall ms [B] from the embeddings of each placement's devices; those that do not exist are left
        out."""
        if exists_BD is not None:
            devices_BDE = np.where(exists_BD[..., None], devices_BDE, -np.inf)
        largest_BE = devices_BDE.argmax(axis=1)
        at = (np.arange(len(devices_BDE))[:, None], largest_BE, np.arange(EMBED))
        overall_B1, net_backward = self.overall_net.forward(devices_BDE[at])

        def backward(grad_B: np.ndarray) -> np.ndarray:
            grad_BDE = np.zeros_like(devices_BDE)
            grad_BDE[at] = net_backward(grad_B[:, None])
            return grad_BDE

        return overall_B1[:, 0], backward

    def gradients(self, features_RF: np.ndarray, kernels: Kernels, placements: Placements) -> float:
        """Computes the loss's gradients: the three heads' mean squared errors on some devices plus the overall
        cost's on some placements."""
        tables_RE, tables_backward = self.table_net.forward(features_RF)
        predicted_B3, heads_backward = self.heads(kernels.owned_BR @ tables_RE)
        owned_BDR = placements.owned_BDR
        overall_B, overall_backward = self.overall(owned_BDR @ tables_RE, np.any(owned_BDR, axis=2))
        error_B3, error_B = predicted_B3 - kernels.heads_B3, overall_B - placements.overall_B
        grad_RE = kernels.owned_BR.T @ heads_backward(2 / len(error_B3) * error_B3)
        grad_BDE = overall_backward(2 / len(error_B) * error_B)
        grad_RE += owned_BDR.reshape(-1, len(features_RF)).T @ grad_BDE.reshape(-1, EMBED)
        tables_backward(grad_RE, to_inputs=False)
        return float((error_B3**2).sum(axis=1).mean() + (error_B**2).mean())


@dataclass(frozen=True)
class Episodes:
    """Sampled episodes. order: tables by number, in the order of placing [T]; costs_TED3: heads of the devices
    before each step."""

    order: np.ndarray
    actions_TE: np.ndarray
    costs_TED3: np.ndarray
    predicted_E: np.ndarray


class ReferencePolicy:
    """Maps each table through 21-128-32 and sums over a device, maps its three costs through 3-64-32, and gives one
    logit a device."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.table_net = _table_net(generator)
        self.cost_net = Mlp([len(HEADS), 64, EMBED], generator, final_relu=True, uniform=True)
        self.logit_net = Mlp([2 * EMBED, 1], generator, uniform=True)
        self.nets = {"table_net": self.table_net, "cost_net": self.cost_net, "logit_net": self.logit_net}

    def logits(self, held: np.ndarray, costs: np.ndarray) -> tuple[np.ndarray, Backward]:
        """Returns logits [...] from sums of table embeddings [..., 32] and predicted costs [..., 3]. Gradients reach
        the sums."""
        costs_embedded, cost_backward = self.cost_net.forward(costs)
        logits, logit_backward = self.logit_net.forward(np.concatenate([held, costs_embedded], axis=-1))

        def backward(grad: np.ndarray) -> np.ndarray:
            grad_inputs = logit_backward(grad[..., None])
            cost_backward(grad_inputs[..., EMBED:], to_inputs=False)
            return grad_inputs[..., :EMBED]

        return logits[..., 0], backward

    def gradients(self, features_RF: np.ndarray, episodes: Episodes, entropy_weight: float) -> None:
        """Computes the policy's gradients, as means over steps and episodes. features_RF: this task's tables and the
        row of zeros."""
        steps = len(episodes.order)
        reward_TE = np.tile(-episodes.predicted_E.astype(np.float64), (steps, 1))
        advantage_E = (reward_TE[0] - reward_TE.mean()) / (reward_TE.std(ddof=1) + 1e-8)
        embedding, embedding_backward = self.table_net.forward(features_RF)
        placed = episodes.actions_TE[..., None] == np.arange(episodes.costs_TED3.shape[2])
        held = np.zeros((*placed.shape, EMBED), dtype=embedding.dtype)  # what was on each device before the step
        np.cumsum((placed[..., None] * embedding[episodes.order][:, None, None, :])[:-1], axis=0, out=held[1:])
        empty = (placed.cumsum(axis=0) - placed == 0)[..., None]
        logits, logits_backward = self.logits(np.where(empty, embedding[-1], held), episodes.costs_TED3)
        everything = np.ones_like(placed)
        grad = logit_gradient(logits, everything, placed, advantage_E / steps, entropy_weight)

        grad_held = logits_backward(grad)
        grad_embedding = np.zeros_like(embedding)
        grad_embedding[-1] = (grad_held * empty).sum(axis=(0, 1, 2))
        grad_held = grad_held * ~empty
        after = grad_held[::-1].cumsum(axis=0)[::-1] - grad_held  # a table is held in all steps after its own
        grad_embedding[episodes.order] = (after * placed[..., None]).sum(axis=(1, 2))
        embedding_backward(grad_embedding, to_inputs=False)


def _table_net(generator: np.random.Generator) -> Mlp:
    return Mlp([NUM_RAW, 128, EMBED], generator, final_relu=True, uniform=True)
