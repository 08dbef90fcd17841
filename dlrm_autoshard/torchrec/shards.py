"""This rank's shards of a sharded EmbeddingBagCollection: their tensors, and the settings of their lookups.

shards = local_shards(collection)               # {table: Shard}
shards["item"].tensors                          # live views: {"weight": [rows, dim], "sum": [rows], ...}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from dlrm_autoshard.tables import Shard as ShardName
from dlrm_autoshard.torchrec.tables import is_data_parallel


@dataclass(frozen=True)
class Settings:
    """Settings of a table's lookup outside its rows. group: its optimizer's param group without params, such as the
    learning rate a scheduler has set. rate: the one in effect; the group's takes effect at the fused optimizer's next
    step. counters: fbgemm's iteration counters."""

    group: Mapping[str, Any]
    rate: float
    counters: Mapping[str, int]


@dataclass(frozen=True)
class Shard:
    """A table on this rank, or some of its columns."""

    tensors: Mapping[str, Tensor]
    settings: Settings

    @property
    def formats(self) -> dict[str, tuple[int, int]]:
        """(bytes per element, number of dimensions) of each tensor."""
        return {name: (tensor.element_size(), tensor.dim()) for name, tensor in self.tensors.items()}


def owned_lookups(collection: Any) -> list[tuple[Any, Any]]:
    """Returns (lookup, output exchange) of tables that have owners, without data-parallel ones."""
    pairs = zip(collection._lookups, collection._output_dists, strict=True)
    return [(lookup, exchange) for lookup, exchange in pairs if not is_data_parallel(lookup)]


def kernels(collection: Any) -> Iterator[tuple[Any, list[ShardName]]]:
    """Yields (fused kernel, names of its tables' shards)."""
    for lookup, _ in owned_lookups(collection):
        for kernel, config in zip(lookup._emb_modules, lookup.grouped_configs, strict=True):
            yield kernel, [shard_name(table) for table in config.embedding_tables]


def shard_name(table: Any) -> ShardName:
    """Returns our plans' name for a ShardedEmbeddingTable of TorchRec on a rank."""
    if table.local_cols == table.embedding_dim:
        return ShardName(table.name)
    start = table.local_metadata.shard_offsets[1]
    return ShardName.of(table.name, (start, start + table.local_cols))


def local_shards(collection: Any) -> dict[ShardName, Shard]:
    """Returns this rank's shards by name, with the table's name in its module."""
    shards = {}
    for kernel, tables in kernels(collection):
        tbe = kernel.emb_module
        [group] = kernel.fused_optimizer.param_groups
        kept = {key: value for key, value in group.items() if key != "params"}
        settings = Settings(kept, tbe.get_learning_rate(), _counters(tbe))
        for table, weight, state in zip(tables, tbe.split_embedding_weights(), _states(tbe), strict=True):
            shards[table] = Shard({"weight": weight.detach(), **state}, settings)
    return shards


def restore_settings(collection: Any, settings_of: Callable[[ShardName], Settings]) -> None:
    """Sets a collection's learning rates and iteration counters to `settings_of` its tables."""
    for kernel, tables in kernels(collection):
        settings = settings_of(tables[0])
        [group] = kernel.fused_optimizer.param_groups
        group.update(settings.group)
        kernel.emb_module.set_learning_rate(settings.rate)
        for name, value in settings.counters.items():
            getattr(kernel.emb_module, name).fill_(value)


def why_not(live: Any, fresh: Any, settings_of: Callable[[ShardName], Settings]) -> str | None:
    """Returns in words why the lookups of `fresh` cannot take over the settings of `live`; None if they can."""
    for _, tables in kernels(fresh):
        for table in tables[1:]:
            if settings_of(table) != settings_of(tables[0]):
                return (
                    f"tables '{tables[0]}' and '{table}' would share a lookup but differ in learning rate or iterations"
                )
    of_both = [[settings_of(tables[0]).group for _, tables in kernels(module)] for module in (live, fresh)]
    before, after = map(len, of_both)
    if before != after and any("initial_lr" in group for groups in of_both for group in groups):
        return (
            f"a torch learning rate scheduler counts {before} param groups of the tables here, but the plan makes "
            f"{after}; schedule the dense part alone, and set the tables' `lr` in each group yourself"
        )
    return None


def digest(tensor: Tensor) -> str:
    """Returns a hash of a tensor's bytes."""
    host = tensor.detach().cpu().contiguous()
    return xxhash.xxh3_128_hexdigest(host.reshape(-1).view(torch.uint8).numpy().data)


def _states(tbe: Any) -> list[dict[str, Tensor]]:
    """Returns each table's optimizer state."""
    rows = [spec[0] for spec in tbe.embedding_specs]
    if not tbe.split_optimizer_states():
        return [{} for _ in rows]
    return [
        {name: value for name, value in states.items() if value.dim() and len(value) == count and name != "iter"}
        for states, count in zip(tbe.get_optimizer_state(), rows, strict=True)
    ]


def _counters(tbe: Any) -> dict[str, int]:
    return {name: int(getattr(tbe, name)) for name in ("iter", "iter_cpu") if hasattr(tbe, name)}
