"""The fused optimizers of tables, as people name them in a loop of their own.

bags = ShardedEmbeddingBags(tables, optimizer=RowwiseAdagrad(lr=0.02))
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.optimizers import OPTIMIZERS, TableOptimizerConfig


def RowwiseAdagrad(lr: float = 0.02, eps: float = 1e-8, per_part: bool = False) -> TableOptimizerConfig:
    """One sum of squared gradients a row. per_part: of a split table, a row and part; else no table can be split."""
    return TableOptimizerConfig(name="rowwise_adagrad", lr=lr, eps=eps, per_part=per_part)


def Adagrad(lr: float = 0.02, eps: float = 1e-8) -> TableOptimizerConfig:
    """One sum of squared gradients an element."""
    return TableOptimizerConfig(name="adagrad", lr=lr, eps=eps)


def SGD(lr: float = 0.02) -> TableOptimizerConfig:
    """Plain SGD for tables."""
    return TableOptimizerConfig(name="sgd", lr=lr)


def Adam(lr: float = 0.001, eps: float = 1e-8) -> TableOptimizerConfig:
    """On GPUs only: fbgemm has no CPU kernel for it."""
    return TableOptimizerConfig(name="adam", lr=lr, eps=eps)


def Frozen() -> TableOptimizerConfig:
    """No updates: the table stays as it starts, or as it is loaded."""
    return TableOptimizerConfig(name="frozen")


def check_optimizers(optimizers: Iterable[TableOptimizerConfig], device: torch.device) -> None:
    """UserError where fbgemm has no kernel of one of them for this device."""
    for optimizer in optimizers:
        if device.type not in optimizer.record.devices:
            *most, last = (name for name, own in OPTIMIZERS.items() if own.updates and device.type in own.devices)
            raise UserError(
                f"tables.optimizer.name '{optimizer.name}' is for {' and '.join(optimizer.record.devices).upper()} "
                f"only; on {device.type.upper()} use {', '.join(most)} or {last}."
            )
