"""A DistributedModelParallel's tables as Autoshard uses them: timed by hooks, observed, and moved.

bags = TorchrecBags(model, optimizer)           # on every rank; the model does not change
bags.move_to(plan)                              # move.py
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dlrm_autoshard.config import ExchangeDtypes
from dlrm_autoshard.distributed.moves.movable import ArrivedIds
from dlrm_autoshard.distributed.moves.reshard import ReshardRefused, ReshardStats
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.torchrec.column_order import ColumnOrder
from dlrm_autoshard.torchrec.model import PIPELINED, ShardedModel
from dlrm_autoshard.torchrec.move import move
from dlrm_autoshard.torchrec.shards import owned_lookups, shard_name
from dlrm_autoshard.torchrec.stages import StageHooks
from dlrm_autoshard.torchrec.tables import TorchrecError, table_key


class TorchrecBags:
    """Implements `movable.MovableBags` for all EmbeddingBagCollections of a model."""

    def __init__(self, model: Any, optimizer: Any = None, *, same_columns: bool = True) -> None:
        """optimizer: the model's; its references to tables are updated when these move. same_columns: keep the present
        column order of KeyedTensor.values(). TorchrecError says what prevents moves."""
        self.sharded = sharded = ShardedModel(model, optimizer)
        self.tables, self.device, self.runtime = sharded.model_tables, sharded.device, sharded.runtime
        self.exchange_dtype, self.shared_memory = ExchangeDtypes(), False
        self.clock = StageClock(self.device, self.runtime.clock_group)
        self._heard: list[Callable[[ArrivedIds, int], None]] = []
        self._lookups: list[Lookup] = []  # of this step, so far
        for path, collection in self.sharded.collections.items():
            collection.register_forward_pre_hook(self._remember(path), with_kwargs=True)
            if same_columns:
                collection.register_forward_hook(ColumnOrder(collection))
        self._hooks: list[StageHooks] = []
        self.hook_in()

    @property
    def plan(self) -> ShardingPlan:
        """The live plan."""
        return self.sharded.plan

    def on_lookup(self, listener: Callable[[ArrivedIds, int], None]) -> None:
        self._heard.append(listener)

    def move_to(self, plan: ShardingPlan, *, checksums: bool = False) -> ReshardStats:
        """Makes `plan` the live one, between steps, on every rank, without changing a bit of the model. Compares
        digests whatever `checksums` is. ReshardRefused: see `move`."""
        try:
            stats = move(self.sharded, plan)
            self.hook_in()
        except ReshardRefused as refused:
            raise ReshardRefused(*refused.args) from None  # drops frames that hold the rebuilt modules
        finally:
            gc.collect()  # TorchRec's modules are in reference cycles, which would keep tables alive
        return stats

    def hook_in(self) -> None:
        """Puts hooks on the current lookups."""
        for hooks in self._hooks:
            hooks.remove()
        self._hooks = [StageHooks(c, self.clock, self._arrival(path)) for path, c in self.sharded.collections.items()]

    # -- what is heard -------------------------------------------------------------------------------------------------

    def _remember(self, path: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def remember(collection: Any, inputs: tuple[Any, ...], by_name: dict[str, Any]) -> None:
            if collection.is_pipelined:
                raise TorchrecError(PIPELINED.format(path))
            # Drop those of a step that broke off between two modules, or of a module that is called twice.
            self._lookups = [lookup for lookup in self._lookups if lookup.path != path]
            if collection.training and torch.is_grad_enabled():
                self.sharded.last_features[path] = inputs, by_name

        return remember

    def _arrival(self, path: str) -> Callable[[Any, Any], None]:
        def arrived(features: Any, groups: Any) -> None:
            self._lookups.append(Lookup(path, features, groups))
            collections = self.sharded.collections
            if len(self._lookups) == sum(len(owned_lookups(collection)) for collection in collections.values()):
                lookups, self._lookups = self._lookups, []
                samples = features.stride() // self.runtime.world_size
                names = [shard.name for shard in self.sharded.local_shards]
                ids = KeyedIds(lookups, names, collections, samples, self.device)
                for listener in self._heard:
                    listener(ids, samples)

        return arrived


@dataclass
class Lookup:
    """Input of a lookup: a KeyedJaggedTensor with the features of its groups, in order."""

    path: str
    features: Any
    groups: Any


class KeyedIds:
    """Implements `movable.ArrivedIds`; joins the ids on demand."""

    def __init__(
        self,
        lookups: Sequence[Lookup],
        shards: Sequence[str],
        collections: Mapping[str, Any],
        batch_size: int,
        device: torch.device,
    ) -> None:
        self._lookups, self._shards, self._collections = lookups, shards, collections
        self.batch_size, self._device = batch_size, device

    @cached_property
    def _by_table(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """(lengths, values) of each feature, by shard."""
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self._shards}
        for lookup in self._lookups:
            tables = [t for group in lookup.groups for t in group.embedding_tables for _ in t.feature_names]
            lengths = lookup.features.lengths().view(len(tables), -1) if tables else []
            values = lookup.features.values().split(lookup.features.length_per_key()) if tables else []
            for table, row, ids in zip(tables, lengths, values, strict=True):
                parts[table_key(lookup.path, shard_name(table), self._collections)].append((row, ids))
        return parts

    @property
    def values_N(self) -> Tensor:
        ids = [values for parts in self._by_table.values() for _, values in parts]
        return torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int64, device=self._device)

    @property
    def offsets(self) -> Tensor:
        rows = [row for parts in self._by_table.values() for row, _ in parts]
        lengths = torch.cat(rows).long() if rows else torch.zeros(0, dtype=torch.int64, device=self._device)
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
