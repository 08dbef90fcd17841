"""The one distribution over devices: it samples the action and it scores it, so rollout and loss agree.

    choice = MaskedCategorical(logits, legal)
    action = choice.sample(gumbel)           # argmax of log-probabilities + Gumbel noise is a sample
    choice.log_prob(action)                  # of the very same distribution: illegal devices have probability 0

The rollout's numpy loop does what `sample` does; a test holds the two together.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class MaskedCategorical:
    """`logits` and `legal`: [..., D], at least one legal device in each row."""

    def __init__(self, logits: Tensor, legal: Tensor) -> None:
        self.log_probs = logits.masked_fill(~legal, -torch.inf).log_softmax(dim=-1)

    def sample(self, gumbel: Tensor | None) -> Tensor:
        """[...]: the likeliest device, or with Gumbel noise [..., D] a sample."""
        return (self.log_probs if gumbel is None else self.log_probs + gumbel).argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        # 0 x -inf is no number; an illegal device adds nothing.
        return -(self.log_probs.exp() * self.log_probs.clamp(min=-1e9)).sum(dim=-1)


def logit_gradient(
    logits: np.ndarray, legal: np.ndarray, taken: np.ndarray, advantage_E: np.ndarray, entropy_weight: float
) -> np.ndarray:
    """[U, E, D]: the gradient of REINFORCE's loss with respect to the logits, for `taken` [U, E, D] one-hot actions.

    The loss: minus the mean over episodes of advantage x log-probability of the episode's actions, minus
    `entropy_weight` x the mean entropy of a step.
    """
    steps, episodes, _ = logits.shape
    masked = np.where(legal, logits, -np.inf)
    masked -= masked.max(axis=-1, keepdims=True)
    probs = np.exp(masked)
    total = probs.sum(axis=-1, keepdims=True)
    probs /= total
    log_probs = np.where(legal, masked - np.log(total), 0)
    entropy = -(probs * log_probs).sum(axis=-1, keepdims=True)
    gradient: np.ndarray = (probs - taken) * (advantage_E / episodes).astype(np.float32)[:, None]
    gradient += np.float32(entropy_weight / (steps * episodes)) * probs * (log_probs + entropy)
    return gradient


def gumbel_noise(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    return generator.gumbel(size=shape).astype(np.float32)
