"""Interfaces of tables on ranks for profiling and resharding, with our lookup or TorchRec's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dlrm_autoshard.config import ExchangeDtypes, TablesConfig
from dlrm_autoshard.distributed.moves.reshard import ReshardStats
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig


class PlacedTables(Protocol):
    """Tables under their live plan."""

    @property
    def tables(self) -> tuple[TableConfig, ...]: ...
    @property
    def replicated(self) -> tuple[TableConfig, ...]:
        """Tables copied to every rank, outside the plan."""
        ...

    @property
    def plan(self) -> ShardingPlan: ...
    @property
    def local_shards(self) -> tuple[TableConfig, ...]:
        """This rank's shards, each once."""
        ...

    @property
    def local_lookups(self) -> tuple[TableConfig, ...]:
        """The shard of each lookup in the order of observation: one per feature."""
        ...

    @property
    def config(self) -> TablesConfig: ...
    @property
    def device(self) -> torch.device: ...


class ArrivedIds(Protocol):
    """Ids that reached this rank in a step, in the order of `local_lookups`."""

    @property
    def values_N(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor:
        """Bag offsets [T_local * W * B + 1]."""
        ...

    @property
    def batch_size(self) -> int:
        """B, per rank."""
        ...


class MovableBags(Protocol):
    """A lookup of such tables that can be timed, observed, and moved to another plan between steps."""

    @property
    def sharded(self) -> PlacedTables: ...
    @property
    def tables(self) -> tuple[TableConfig, ...]: ...
    @property
    def plan(self) -> ShardingPlan: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def clock(self) -> StageClock: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def exchange_dtype(self) -> ExchangeDtypes: ...
    @property
    def shared_memory(self) -> bool:
        """Whether vectors travel through shared memory within a host, instead of the process group."""
        ...

    def on_lookup(self, listener: Callable[[ArrivedIds, int], None]) -> None:
        """Calls `listener(ids, B)` at each training lookup."""
        ...

    def move_to(self, plan: ShardingPlan, *, checksums: bool = False) -> ReshardStats:
        """Moves tables. Collective. ReshardRefused, on every rank: the old plan is still live."""
        ...
