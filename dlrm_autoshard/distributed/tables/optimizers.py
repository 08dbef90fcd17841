"""The fused optimizers of tables, as people name them in a loop of their own.

bags = ShardedEmbeddingBags(tables, optimizer=RowwiseAdagrad(lr=0.02))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.optimizers import OPTIMIZERS, TableOptimizerConfig

# max_gradient, of all of them: the most of each number of a vector's gradient; what is beyond is cut.


def RowwiseAdagrad(
    lr: float = 0.02,
    eps: float = 1e-8,
    per_part: bool = False,
    weight_decay: float = 0.0,
    max_gradient: float | None = None,
) -> TableOptimizerConfig:
    """One sum of squared gradients a row. per_part: of a split table, a row and part; else no table can be split.
    weight_decay: times a row's weights, is added to the row's gradient in steps that look it up."""
    own = {"per_part": per_part, "weight_decay": weight_decay, "max_gradient": max_gradient}
    return _made("rowwise_adagrad", lr=lr, eps=eps, **own)


def Adagrad(lr: float = 0.02, eps: float = 1e-8, max_gradient: float | None = None) -> TableOptimizerConfig:
    """One sum of squared gradients an element."""
    return _made("adagrad", lr=lr, eps=eps, max_gradient=max_gradient)


def SGD(lr: float = 0.02, max_gradient: float | None = None) -> TableOptimizerConfig:
    """Plain SGD for tables."""
    return _made("sgd", lr=lr, max_gradient=max_gradient)


def Adam(
    lr: float = 0.001, eps: float = 1e-8, weight_decay: float = 0.0, max_gradient: float | None = None
) -> TableOptimizerConfig:
    """On GPUs only: fbgemm has no CPU kernel for it. weight_decay: AdamW's, in steps that look a row up."""
    return _made("adam", lr=lr, eps=eps, weight_decay=weight_decay, max_gradient=max_gradient)


def _made(name: str, **settings: Any) -> TableOptimizerConfig:
    return TableOptimizerConfig.model_validate({"name": name, **settings})


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
