"""A shard's tensor of a checkpoint, from whatever columns of its table were saved.

assembled(saved, "item[0:64].weight", like=live)       # [rows, 64], of `item.weight` or of parts that hold its columns
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dlrm_autoshard.tables import Shard


def assembled(saved: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor | None:
    """name: of the shard's tensor; like: the live one. None where none of its columns were saved. What is kept a row is
    the parts' mean, by columns."""
    owner, _, tensor = name.rpartition(".")
    wanted, parts = Shard.parse(owner), {}
    for key, value in saved.items():
        own, _, of = key.rpartition(".")
        shard = Shard.parse(own)
        if key == name or (of == tensor and like.dim() == 1 and shard == Shard(wanted.table)):
            return value
        if of == tensor and shard & wanted is not None:
            parts[shard.columns or (0, value.shape[1])] = value
    if not parts:
        return None
    start, stop = wanted.columns or (0, max(last for _, last in parts))
    cuts = {(first, last): (max(first, start), min(last, stop)) for first, last in sorted(parts)}
    if like.dim() == 1:
        return torch.stack([parts[own] * ((b - a) / (stop - start)) for own, (a, b) in cuts.items()]).sum(0)
    return torch.cat([parts[own][:, a - own[0] : b - own[0]] for own, (a, b) in cuts.items()], 1)
