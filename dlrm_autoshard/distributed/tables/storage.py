"""Where a rank's rows and optimizer state live, and the fused lookup that reads and updates them.

storage.tensors("user")                # {"weight": [rows, dim], "momentum1": [rows]}, live
storage.hold(["user", "item[0:64]"])   # these shards can be looked up, in this order; the others' memory goes
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.distributed.tables.memory import (
    Allocate,
    Allocated,
    Places,
    Reserved,
    StorageError,
    on_device,
    on_host_for,
)
from dlrm_autoshard.distributed.tables.optimizers import check_optimizer
from dlrm_autoshard.distributed.tables.tbe import RowCache, Tbe, make_tbe
from dlrm_autoshard.formats.words import some_of
from dlrm_autoshard.tables import Pooling, Shard, TableConfig, TableDtype, TableOptimizer

_DTYPES: dict[TableDtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16}
_CACHE_SLOT, _CACHE_ROW = 16, 4
"""Bytes on the device beside a cached row (tag and age), and for every row, cached or not (its table's number)."""


def state_shapes(table: TableConfig, optimizer: TableOptimizer) -> dict[str, tuple[int, ...]]:
    """Optimizer state of a table by name: what a checkpoint or a move must carry beside the weight."""
    rows, dim = table.num_embeddings, table.embedding_dim
    shapes: dict[TableOptimizer, dict[str, tuple[int, ...]]] = {
        "rowwise_adagrad": {"momentum1": (rows,)},
        "adagrad": {"momentum1": (rows, dim)},
        "sgd": {},
        "adam": {"momentum1": (rows, dim), "momentum2": (rows, dim)},
    }
    return shapes[optimizer]


class Storage:
    """One dtype for all tables, as one fused lookup has one, which sums where poolings differ. Names are of shards.

    On CPU memory is reserved (memory.py): arriving tables are received in place, departing ones give their pages
    back while they are sent. On a GPU each table is an allocation. Either way what stays stays where it is.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        config: TablesConfig,
        device: torch.device,
        allocate: Allocate | None = None,
        features: Mapping[str, int] | None = None,
        plain_loop: bool | None = None,
        apart: Collection[str] = (),
    ) -> None:
        """allocate: gives each table's tensors. None: the device's memory on a GPU, reserved memory on CPU.
        features: how many look up rows of each table, where several share some. plain_loop: as `make_tbe` takes it.
        apart: tables each of whose shards has a lookup of its own."""
        check_optimizer(config.optimizer.name, device)
        if apart and device.type != "cpu":
            raise StorageError(
                f"table '{sorted(apart)[0]}' is looked up by a sequence, which needs CPU ranks (run.device: cpu). "
                "On a GPU pool it."
            )
        self._tables, self._config, self._device = {table.name: table for table in tables}, config, device
        self._dtype, self._pooling = shared_format(tables)
        self._features, self._plain_loop, self._apart = features, plain_loop, frozenset(apart)
        self._process = os.getpid()
        self._allocate, self.in_pieces = allocate, allocate is None and device.type == "cpu"
        """in_pieces: memory is taken and given back piece by piece, not table by table."""
        self._places = Places(tables)
        self._memory = {
            tensor: self._memory_for(tensor) for tensor in ("weight", *state_shapes(tables[0], config.optimizer.name))
        }
        self._held: tuple[str, ...] = ()
        self._claimed: set[str] = set()
        self._cache_is_newer = False
        self.lookup: Tbe | None = None
        self.lookups_apart: dict[str, Tbe] = {}
        self._row_cache: RowCache | None = None
        self._no_weight_gradients: Tensor | None = None

    @property
    def can_leave_device(self) -> bool:
        return not self.in_pieces and not self._on_host("weight")

    def look_up(
        self, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None = None, *, training: bool = True
    ) -> Tensor:
        """Pooled vectors [B, D] of the held tables that are looked up together, of which there is at least one.
        weights_N: of the ids, if any. training: a backward pass follows."""
        assert self.lookup is not None
        self._check_process()
        self._cache_is_newer = True
        cache = self._row_cache
        # The kernel that takes the weights' own gradients, on GPUs whether they are wanted or not, checks bounds of one
        # table's allocation; asked of no table, it ends before.
        unwanted = self._no_weight_gradients if weights_N is not None else None
        with nullcontext() if cache is None else cache.lookup(values_N, training=training):
            pooled: Tensor = (
                self.lookup(values_N, offsets, weights_N)
                if unwanted is None
                else self.lookup(values_N, offsets, weights_N, feature_requires_grad=unwanted)
            )
        return pooled

    def look_up_apart(self, name: str, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> Tensor:
        """Pooled vectors [B, D] of a held shard of a table apart, of any number of bags."""
        self._check_process()
        pooled: Tensor = self.lookups_apart[name](values_N, offsets, weights_N)
        return pooled

    @property
    def lookups(self) -> list[Tbe]:
        """All fused lookups."""
        return [*([] if self.lookup is None else [self.lookup]), *self.lookups_apart.values()]

    def prefetch(self, values_N: Tensor, offsets: Tensor) -> None:
        """Where rows lie in host memory beside a GPU: to its cache, for the next training lookup."""
        if self._row_cache is not None:
            self._row_cache.prefetch(values_N, offsets)

    def take_back_lookup(self) -> None:
        """No backward pass will follow the last training lookup."""
        if self._row_cache is not None:
            self._row_cache.take_back()

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Returns live views {weight, momentum1, ...} of a shard that is held, or claimed and about to be. StorageError
        where it is neither: fresh memory would pass for its values."""
        if name not in self._held and name not in self._claimed:
            raise StorageError(
                f"'{name}' is not on this rank, which holds {some_of(self._held) or 'nothing'}. Ask the rank that the "
                "plan gives it to."
            )
        self._check_process()
        self._flush()
        return {tensor: memory.view(name) for tensor, memory in self._memory.items()}

    def table(self, name: str) -> TableConfig:
        """A shard as a table of its own."""
        whole = self._tables.get(name)
        return self._tables[(shard := Shard.parse(name)).table].holding(shard) if whole is None else whole

    def claim(self, names: Iterable[str]) -> str | None:
        """Takes places for shards that are to arrive, in reserved memory where that is used. Returns a sentence, and
        none is taken, where one has none."""
        names = list(names)
        try:
            for name in names if self.in_pieces else ():
                self._places.of(name)
            self._claimed.update(names)
        except StorageError as error:
            self.give_up(names)
            return str(error)
        return None

    def give_up(self, names: Iterable[str]) -> None:
        """Of what `claim` took: these shards do not arrive."""
        for name in names:
            self._claimed.discard(name)
            self._places.free(name)

    def shape(self, name: str, tensor: str) -> tuple[int, ...]:
        table = self.table(name)
        if tensor == "weight":
            return table.num_embeddings, table.embedding_dim
        return state_shapes(table, self._config.optimizer.name)[tensor]

    def row_bytes(self, name: str) -> dict[str, tuple[int, int]]:
        """(rows, bytes a row) of a shard's tensors, wherever it lives."""
        sizes = {}
        for tensor in self._memory:
            rows, *columns = self.shape(name, tensor)
            item = _DTYPES[self._dtype].itemsize if tensor == "weight" else 4
            sizes[tensor] = rows, item * torch.Size(columns).numel()
        return sizes

    def hold(self, names: Sequence[str]) -> None:
        """Makes `names` what this rank holds. Values of those that arrived lie in their `tensors` already."""
        self._flush()
        self._claimed.difference_update(names)
        if self.lookup is not None and self._held == tuple(names):
            return  # a move of others: what the device caches stays
        self.lookup = self._row_cache = None  # with its rows, before there is another
        self.lookups_apart = {}
        for name in set(self._held) - set(names):
            for memory in self._memory.values():
                memory.release(name)
            self._places.free(name)
        self._held = tuple(names)
        if names:
            for name in names:
                self.tensors(name)
            self.lookups_apart = {name: self._build([name], None) for name in names if self._is_apart(name)}
        if together := [name for name in names if not self._is_apart(name)]:
            self.lookup = self._build(together, self._table_of(together))
            self._row_cache = RowCache(self.lookup, self._device) if self._caches_rows else None
            if self._device.type != "cpu":
                lookups = len(self._table_of(together) or together)
                self._no_weight_gradients = torch.zeros(lookups, dtype=torch.int32, device=self._device)

    def overwritten(self) -> None:
        """Somebody has written into what `tensors` gave: rows that the device caches are older."""
        self._cache_is_newer = False
        if self._row_cache is not None:
            self._row_cache.forget()

    def release_part(self, name: str, tensor: str, start: int, stop: int) -> None:
        """Bytes [start, stop) of a departing shard have been sent, as have those before them."""
        self._memory[tensor].release_part(name, start, stop)

    def leave_device(self, names: Iterable[str]) -> None:
        """Departing tables wait in host memory, so that what arrives can have their place. No lookup until `hold`."""
        self._flush()
        self.lookup = self._row_cache = None
        for name in names:
            for memory in self._memory.values():
                if isinstance(memory, Allocated):
                    memory.to_host(name)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def bytes_of(self, names: Iterable[str]) -> dict[str, int]:
        """What these tables take: {"device": bytes, "host": bytes}, without the cache."""
        sizes = {"device": 0, "host": 0}
        for table in map(self.table, names):
            sizes["host" if self._on_host("weight") else "device"] += table.weight_bytes
            for state, shape in state_shapes(table, self._config.optimizer.name).items():
                sizes["host" if self._on_host(state) else "device"] += 4 * torch.Size(shape).numel()
        return sizes

    def cache_bytes(self, names: Iterable[str]) -> int:
        """Of the device's cache where all weights are in host memory beside a GPU."""
        tables = [self.table(name) for name in names]
        if not tables or not self._caches_rows:
            return 0
        rows = sum(table.num_embeddings for table in tables)
        row = max(table.embedding_dim for table in tables) * _DTYPES[self._dtype].itemsize
        return int(self._config.cache_load_factor * rows * (row + _CACHE_SLOT)) + _CACHE_ROW * rows

    def _check_process(self) -> None:
        """StorageError in a fork of the process that made this: it has none of the memory, and would be killed."""
        if self._process != os.getpid():
            raise StorageError(
                f"process {os.getpid()} is a fork of process {self._process}, which has the tables: read them there, "
                "and hand on copies (`state_dict()` with each tensor cloned)."
            )

    def _flush(self) -> None:
        """Rows of which the cache has newer values, to where `tensors` reads them: once, however often it is asked."""
        if self._cache_is_newer and self.lookup is not None:
            self.lookup.flush()
        self._cache_is_newer = False

    @property
    def _caches_rows(self) -> bool:
        """Weights lie in host memory, and some of their rows on the GPU."""
        return self._config.location == "managed_caching" and self._device.type != "cpu"

    def _on_host(self, tensor: str) -> bool:
        if self._device.type == "cpu" or self._config.location == "device":
            return self.in_pieces  # not in pieces on CPU: memory that stands for a device's
        return tensor == "weight" or self._config.optimizer.name != "rowwise_adagrad"  # as fbgemm has it

    def _memory_for(self, tensor: str) -> Reserved | Allocated:
        dtype = _DTYPES[self._dtype] if tensor == "weight" else torch.float32
        shape_of = partial(self.shape, tensor=tensor)
        if self.in_pieces:
            return Reserved(shape_of, dtype, self._places)
        default = on_host_for(self._device) if self._on_host(tensor) else on_device(self._device)
        return Allocated(shape_of, dtype, self._allocate or default, zeros=tensor != "weight")

    def _is_apart(self, name: str) -> bool:
        return Shard.parse(name).table in self._apart

    def _build(self, shards: Sequence[str], table_of: list[int] | None) -> Tbe:
        tables = [self.table(name) for name in shards]
        names = {"weight": "weights"}  # what fbgemm calls it
        return make_tbe(
            [(table.num_embeddings, table.embedding_dim) for table in tables],
            {names.get(tensor, tensor): memory.addressed(shards) for tensor, memory in self._memory.items()},
            self._config.optimizer,
            self._dtype,
            self._pooling,
            self._device,
            self._config.location,
            self._config.cache_load_factor,
            table_of,
            self._plain_loop,
        )

    def _table_of(self, shards: Sequence[str]) -> list[int] | None:
        """Of each lookup, the number of the shard; None where each has one."""
        if self._features is None:
            return None
        counts = [self._features[Shard.parse(name).table] for name in shards]
        return [number for number, count in enumerate(counts) for _ in range(count)]


class Lost:
    """Stands in for a Storage whose rows are not all there any more: any use is a StorageError that says why."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise StorageError(self._why)


def shared_format(tables: Sequence[TableConfig]) -> tuple[TableDtype, Pooling]:
    """Of one lookup in all of them: where some sum and others average, it sums (lookup/means.py)."""
    dtypes, poolings = {table.dtype for table in tables}, {table.pooling for table in tables}
    if len(dtypes) != 1:
        raise StorageError(f"all tables must share one dtype; these have {sorted(dtypes)}.")
    return dtypes.pop(), poolings.pop() if len(poolings) == 1 else "sum"
