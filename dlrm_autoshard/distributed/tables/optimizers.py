"""The fused optimizers of tables, as people name them in a loop of their own.

bags = ShardedEmbeddingBags(tables, optimizer=RowwiseAdagrad(lr=0.02))
"""

from __future__ import annotations

import torch

from dlrm_autoshard.config import TableOptimizerConfig
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.tables import TableOptimizer


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


def check_optimizer(optimizer: TableOptimizer, device: torch.device) -> None:
    """UserError where fbgemm has no kernel of it for this device."""
    if optimizer == "adam" and device.type == "cpu":
        raise UserError("tables.optimizer.name 'adam' is for CUDA only; on CPU use rowwise_adagrad, adagrad or sgd.")
