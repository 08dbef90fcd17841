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


def gumbel_noise(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    return generator.gumbel(size=shape).astype(np.float32)
