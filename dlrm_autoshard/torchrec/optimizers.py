"""The model's optimizers follow moved tables: those who hold a table's parameter get the new one.

TorchRec's fused optimizers are replaced inside the collections' own (rebuild.py); here it is about all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def follow(optimizer: Any, old: Mapping[str, nn.Parameter], new: Mapping[str, nn.Parameter]) -> None:
    """A plain optimizer made of all `model.parameters()` holds tables' too, though it never updates them."""
    becomes = {id(old[name]): new[name] for name in old}
    if optimizer is None or _is_keyed(optimizer):
        return
    for group in optimizer.param_groups:
        group["params"] = [becomes.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter in old.values():
        optimizer.state.pop(parameter, None)  # Adagrad makes some at once, which no step uses: it would hold the table


def why_not_to_follow(optimizer: Any, tables: Sequence[Mapping[str, nn.Parameter]]) -> str | None:
    """Why an optimizer could not be told that these tables have moved, in words; None where it can."""
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
