"""The fused optimizers of tables, as people name them in a loop of their own.

bags = ShardedEmbeddingBags(tables, optimizer=RowwiseAdagrad(lr=0.02))
"""

from __future__ import annotations

from dlrm_autoshard.config import TableOptimizerConfig


def RowwiseAdagrad(lr: float = 0.02, eps: float = 1e-8, per_part: bool = False) -> TableOptimizerConfig:
    """One sum of squared gradients a row. per_part: of a split table, a row and part; else no table can be split."""
    return TableOptimizerConfig(name="rowwise_adagrad", lr=lr, eps=eps, per_part=per_part)


def Adagrad(lr: float = 0.02, eps: float = 1e-8) -> TableOptimizerConfig:
    """One sum of squared gradients an element."""
    return TableOptimizerConfig(name="adagrad", lr=lr, eps=eps)


def SGD(lr: float = 0.02) -> TableOptimizerConfig:
    return TableOptimizerConfig(name="sgd", lr=lr)


def Adam(lr: float = 0.001, eps: float = 1e-8) -> TableOptimizerConfig:
    """On GPUs only: fbgemm has no CPU kernel for it."""
    return TableOptimizerConfig(name="adam", lr=lr, eps=eps)
