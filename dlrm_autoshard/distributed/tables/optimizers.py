"""The fused table optimizers for custom training loops.

bags = ShardedEmbeddingBags(tables, optimizer=RowwiseAdagrad(lr=0.02))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.optimizers import OPTIMIZERS, TableOptimizerConfig

# max_gradient: each element of a vector's gradient is clipped to +- this.


def RowwiseAdagrad(
    lr: float = 0.02,
    eps: float = 1e-8,
    per_part: bool = False,
    weight_decay: float = 0.0,
    max_gradient: float | None = None,
) -> TableOptimizerConfig:
    """Adagrad with one sum of squared gradients per row. per_part: one per row and part of a split table; else tables
    cannot be split. weight_decay: times a row's weights is added to its gradient, in steps that look it up."""
    own = {"per_part": per_part, "weight_decay": weight_decay, "max_gradient": max_gradient}
    return _made("rowwise_adagrad", lr=lr, eps=eps, **own)


def Adagrad(lr: float = 0.02, eps: float = 1e-8, max_gradient: float | None = None) -> TableOptimizerConfig:
    """Adagrad with one sum of squared gradients per element."""
    return _made("adagrad", lr=lr, eps=eps, max_gradient=max_gradient)


def SGD(lr: float = 0.02, max_gradient: float | None = None) -> TableOptimizerConfig:
    """Plain SGD."""
    return _made("sgd", lr=lr, max_gradient=max_gradient)


def Adam(
    lr: float = 0.001, eps: float = 1e-8, weight_decay: float = 0.0, max_gradient: float | None = None
) -> TableOptimizerConfig:
    """Adam, on GPUs only: fbgemm has no CPU kernel. weight_decay: AdamW's, in steps that look a row up."""
    return _made("adam", lr=lr, eps=eps, weight_decay=weight_decay, max_gradient=max_gradient)


def _made(name: str, **settings: Any) -> TableOptimizerConfig:
    return TableOptimizerConfig.model_validate({"name": name, **settings})


def Frozen() -> TableOptimizerConfig:
    """Never updates the table: it stays as initialized or loaded."""
    return TableOptimizerConfig(name="frozen")


def check_optimizers(optimizers: Iterable[TableOptimizerConfig], device: torch.device) -> None:
    """Raises UserError if fbgemm lacks a kernel of an optimizer for this device."""
    for optimizer in optimizers:
        if device.type not in optimizer.record.devices:
            *most, last = (name for name, own in OPTIMIZERS.items() if own.updates and device.type in own.devices)
            raise UserError(
                f"tables.optimizer.name '{optimizer.name}' is for {' and '.join(optimizer.record.devices).upper()} "
                f"only; on {device.type.upper()} use {', '.join(most)} or {last}."
            )
