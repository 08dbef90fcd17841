"""A shard's tensor of a checkpoint, from whatever parts of its table were saved.

assembled(saved, "item[0:64].weight", like=live)       # [rows, 64], of `item.weight` or of parts that hold its columns
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dlrm_autoshard.tables import Shard


def assembled(saved: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor | None:
    """name: of the shard's tensor; like: the live one. None where not all of it was saved. What is kept a row is the
    parts' mean, by columns."""
    if name in saved:
        return saved[name]
    owner, _, tensor = name.rpartition(".")
    wanted, parts = Shard.parse(owner), dict[Shard, Tensor]()
    for key, value in saved.items():
        own, _, of = key.rpartition(".")
        shard = Shard.parse(own)
        if of == tensor and shard & wanted is not None:
            parts[shard] = value
    first, last = wanted.columns or (0, max((shard.columns[1] for shard in parts if shard.columns), default=1))
    found, lacking = torch.zeros_like(like), float(like.numel())
    for shard in sorted(parts, key=lambda shard: shard.columns or (0, 0)):
        common = shard & wanted
        assert common is not None
        into, of_shard = found[common.within(wanted)[: like.dim()]], parts[shard][common.within(shard)[: like.dim()]]
        if into.shape != of_shard.shape:
            return parts[shard]  # of another model, whose shape says so
        start, stop = common.columns or (first, last)
        share = (stop - start) / (last - first) if like.dim() == 1 else 1.0
        into.add_(of_shard, alpha=share) if like.dim() == 1 else into.copy_(of_shard)
        lacking -= of_shard.numel() * share
    return found if parts and lacking < 0.5 else None
