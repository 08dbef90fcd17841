"""Memory and fused lookups of the tables of one format.

fbgemm's lookup has one dtype, one optimizer and one learning rate, so tables that differ in them need separate lookups.

memory = FormatMemory(tables, Format("fp16", SGD()), ...)
fused = FusedLookup(memory, ["user", "item[0:64]"], ...); fused.look_up(values_N, offsets)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.distributed.tables.memory import Allocate, Allocated, Places, Reserved, on_device, on_host_for
from dlrm_autoshard.distributed.tables.tbe import RowCache, make_tbe
from dlrm_autoshard.optimizers import TableOptimizerConfig
from dlrm_autoshard.tables import Pooling, Shard, TableConfig, TableDtype

_DTYPES: dict[TableDtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16}
_CACHE_SLOT, _CACHE_ROW = 16, 4
"""Bytes on the device per cached row (tag and age), and per row, cached or not (its table's index)."""


@dataclass(frozen=True)
class Format:
    """Dtype and optimizer, which all tables of one fused lookup must share."""

    dtype: TableDtype
    optimizer: TableOptimizerConfig

    @staticmethod
    def of(table: TableConfig, default: TableOptimizerConfig) -> Format:
        """default: the optimizer of tables without their own."""
        return Format(table.dtype, table.optimizer or default)


class FormatMemory:
    """Holds weights and optimizer state of one format's shards."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        own: Format,
        config: TablesConfig,
        device: torch.device,
        allocate: Allocate | None,
    ) -> None:
        self.format, self.config, self.device = own, config, device
        self._tables = {table.name: table for table in tables}
        self._allocate = allocate
        self.in_pieces = allocate is None and device.type == "cpu"
        """Whether memory is allocated and freed piece by piece, not table by table."""
        self.places = Places(tables)
        self.memory = {tensor: self._memory_for(tensor) for tensor in ("weight", *own.optimizer.record.states)}

    def table(self, name: Shard) -> TableConfig:
        """Returns the shard as a table."""
        whole = self._tables.get(name)
        return self._tables[name.table].holding(name) if whole is None else whole

    def shape(self, name: Shard, tensor: str) -> tuple[int, ...]:
        table = self.table(name)
        if tensor == "weight":
            return table.num_embeddings, table.embedding_dim
        return table.state_shapes(self.format.optimizer.name)[tensor]

    def row_bytes(self, name: Shard) -> dict[str, tuple[int, int]]:
        """Returns (rows, bytes per row) of each tensor of a shard, on this rank or not."""
        sizes = {}
        for tensor in self.memory:
            rows, *columns = self.shape(name, tensor)
            sizes[tensor] = rows, self._dtype(tensor).itemsize * torch.Size(columns).numel()
        return sizes

    def views(self, name: Shard) -> dict[str, Tensor]:
        return {tensor: memory.view(name) for tensor, memory in self.memory.items()}

    def release(self, name: Shard) -> None:
        for memory in self.memory.values():
            memory.release(name)
        self.places.free(name)

    def to_host(self, name: Shard) -> None:
        for memory in self.memory.values():
            if isinstance(memory, Allocated):
                memory.to_host(name)

    def bytes_of(self, name: Shard) -> dict[str, int]:
        """Returns bytes of a shard, without the cache: {"device": bytes, "host": bytes}."""
        sizes = {"device": 0, "host": 0}
        for tensor, (rows, row) in self.row_bytes(name).items():
            sizes["host" if self.on_host(tensor) else "device"] += rows * row
        return sizes

    def cache_bytes(self, names: Sequence[Shard]) -> int:
        """Returns bytes of the GPU's cache of rows; 0 unless weights are in host memory."""
        if not names or not self.caches_rows:
            return 0
        rows = sum(self.table(name).num_embeddings for name in names)
        row = max(self.table(name).embedding_dim for name in names) * self._dtype("weight").itemsize
        return int(self.config.cache_load_factor * rows * (row + _CACHE_SLOT)) + _CACHE_ROW * rows

    @property
    def caches_rows(self) -> bool:
        """Whether weights are in host memory, with a cache of some rows on the GPU."""
        return self.config.location == "managed_caching" and self.device.type != "cpu"

    def on_host(self, tensor: str) -> bool:
        if self.device.type == "cpu" or self.config.location == "device":
            return self.in_pieces  # on CPU without pieces: stands for a device
        return self.format.optimizer.record.states.get(tensor) != "row"  # as in fbgemm

    def _dtype(self, tensor: str) -> torch.dtype:
        return _DTYPES[self.format.dtype] if tensor == "weight" else torch.float32

    def _memory_for(self, tensor: str) -> Reserved | Allocated:
        shape_of = partial(self.shape, tensor=tensor)
        if self.in_pieces:
            return Reserved(shape_of, self._dtype(tensor), self.places)
        default = on_host_for(self.device) if self.on_host(tensor) else on_device(self.device)
        return Allocated(shape_of, self._dtype(tensor), self._allocate or default, zeros=tensor != "weight")


class FusedLookup:
    """Looks up and updates shards of one format, in the order of `names`."""

    def __init__(
        self,
        memory: FormatMemory,
        names: Sequence[Shard],
        pooling: Pooling,
        table_of: Sequence[int] | None,
        plain_loop: bool | None,
    ) -> None:
        """table_of, plain_loop: as `make_tbe` takes them."""
        device, optimizer = memory.device, memory.format.optimizer
        self.names, self.num_lookups = tuple(names), len(table_of or names)
        tables = [memory.table(name) for name in names]
        called = {"weight": "weights"}  # fbgemm's name
        self.tbe = make_tbe(
            [(table.num_embeddings, table.embedding_dim) for table in tables],
            {called.get(tensor, tensor): flat.addressed(names) for tensor, flat in memory.memory.items()},
            optimizer,
            memory.format.dtype,
            pooling,
            device,
            memory.config.location,
            memory.config.cache_load_factor,
            table_of,
            plain_loop,
        )
        self.cache = RowCache(self.tbe, device) if memory.caches_rows else None
        # On GPUs fbgemm always computes gradients of id weights, with a bounds check against a single allocation, which
        # our tables exceed. Asked for no table's gradients, it returns before.
        self.no_weight_gradients: Tensor | None = None
        if device.type != "cpu":
            self.no_weight_gradients = torch.zeros(self.num_lookups, dtype=torch.int32, device=device)
        self._updates = optimizer.record.updates
        self._lr_ratio = optimizer.lr / memory.config.optimizer.lr

    def look_up(self, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None, *, training: bool) -> Tensor:
        unwanted = self.no_weight_gradients if weights_N is not None else None
        training = training and self._updates
        with (
            nullcontext() if self.cache is None else self.cache.lookup(values_N, training=training),
            nullcontext() if self._updates else torch.no_grad(),
        ):
            pooled: Tensor = (
                self.tbe(values_N, offsets, weights_N)
                if unwanted is None
                else self.tbe(values_N, offsets, weights_N, feature_requires_grad=unwanted)
            )
        return pooled

    def set_learning_rate(self, lr: float) -> None:
        """lr: of tables without their own optimizer; other rates change in proportion."""
        self.tbe.set_learning_rate(lr * self._lr_ratio)

    def set_updates(self, updates: int) -> None:
        """Sets fbgemm's iteration count, which it raises at every lookup, evaluations included."""
        for counter in (getattr(self.tbe, "iter", None), getattr(self.tbe, "iter_cpu", None)):
            if counter is not None:
                counter.fill_(updates)
