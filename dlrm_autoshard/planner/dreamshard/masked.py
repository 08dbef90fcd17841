"""The distribution over legal devices. Sampling and loss both use it, so they agree.

log_probs = masked_log_probs(logits, legal)          # illegal devices: -inf
action = (log_probs + gumbel_noise(...)).argmax(-1)  # a sample of that very distribution
"""

from __future__ import annotations

import numpy as np


def masked_log_probs(logits: np.ndarray, legal: np.ndarray) -> np.ndarray:
    """Returns log-probabilities [..., D] of logits [..., D]; each row needs a legal device."""
    masked = np.where(legal, logits, -np.inf)
    masked -= masked.max(axis=-1, keepdims=True)
    log_probs: np.ndarray = masked - np.log(np.exp(masked).sum(axis=-1, keepdims=True))
    return log_probs


def entropy_of(log_probs: np.ndarray) -> np.ndarray:
    """Returns each distribution's entropy."""
    # 0 x -inf is no number; an illegal device adds nothing.
    entropy: np.ndarray = -(np.exp(log_probs) * np.maximum(log_probs, -1e9)).sum(axis=-1)
    return entropy


def logit_gradient(
    logits: np.ndarray, legal: np.ndarray, taken: np.ndarray, advantage_E: np.ndarray, entropy_weight: float
) -> np.ndarray:
    """Returns [U, E, D]: the gradient of REINFORCE's loss with respect to the logits, for `taken` [U, E, D] one-hot
    actions.

    The loss: minus the mean over episodes of advantage x log-probability of the episode's actions, minus
    `entropy_weight` x the mean entropy of a step.
    """
    steps, episodes, _ = logits.shape
    log_probs = masked_log_probs(logits, legal)
    probs = np.exp(log_probs)
    entropy = entropy_of(log_probs)[..., None]
    gradient: np.ndarray = (probs - taken) * (advantage_E / episodes).astype(logits.dtype)[:, None]
    gradient += entropy_weight / (steps * episodes) * probs * (np.maximum(log_probs, -1e9) + entropy)
    return gradient.astype(logits.dtype, copy=False)


def gumbel_noise(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Draws noise; the largest logit plus noise is a sample of the softmax."""
    return generator.gumbel(size=shape).astype(np.float32)
