"""Updates the model's optimizers when tables move: references to a table's parameter are replaced by the new one.

This covers optimizers outside of the collections; rebuild.py replaces TorchRec's fused optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def follow(optimizer: Any, old: Mapping[str, nn.Parameter], new: Mapping[str, nn.Parameter]) -> None:
    """Replaces moved parameters in a plain optimizer of all `model.parameters()`, which never updates tables."""
    becomes = {id(old[name]): new[name] for name in old}
    if optimizer is None or _is_keyed(optimizer):
        return
    for group in optimizer.param_groups:
        group["params"] = [becomes.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter in old.values():
        optimizer.state.pop(parameter, None)  # unused state, which Adagrad creates at once, would keep the table alive


def why_not_to_follow(optimizer: Any, tables: Sequence[Mapping[str, nn.Parameter]]) -> str | None:
    """Returns in words why an optimizer cannot follow moves of these tables; None if it can."""
    held = {id(parameter): name for own in tables for name, parameter in own.items()}
    if optimizer is None or not _is_keyed(optimizer):
        return None
    for key, parameter in optimizer.params.items():
        if id(parameter) in held:
            return (
                f"the optimizer holds table '{held[id(parameter)]}' as '{key}', which its fused optimizer updates; "
                "leave tables out of it with torchrec.optim.keyed's in_backward_optimizer_filter"
            )
    return None


def _is_keyed(optimizer: Any) -> bool:
    from torchrec.optim.keyed import KeyedOptimizer

    return isinstance(optimizer, KeyedOptimizer)
