"""Holds a rank's rows and optimizer state, and the fused lookups that read and update them.

storage.tensors("user")                # {"weight": [rows, dim], "momentum1": [rows]}, live
storage.hold(["user", "item[0:64]"])   # makes these shards the held ones, in this order, and frees the others
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.distributed.tables.fused import Format, FormatMemory, FusedLookup
from dlrm_autoshard.distributed.tables.memory import Allocate, StorageError
from dlrm_autoshard.distributed.tables.optimizers import check_optimizers
from dlrm_autoshard.formats.words import some_of
from dlrm_autoshard.tables import Pooling, Shard, TableConfig

Ids = tuple[Tensor, Tensor, Tensor | None]
"""Values, offsets, and weights of the values, if any."""


class Storage:
    """This rank's shards. Adjacent shards of one format are one fused lookup; if poolings differ, it sums.

    On CPU memory is reserved (memory.py): arriving shards are received in place, and departing ones free their pages
    while they are sent. On a GPU each shard is an allocation. Shards that stay are not copied.
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
        """allocate: allocates each table's tensors. None: device memory on a GPU, reserved memory on CPU. features:
        number of features of each table, if some share one. plain_loop: as in `make_tbe`. apart: tables whose shards
        each have a lookup of their own, such as those with sequences."""
        if apart and device.type != "cpu":
            raise StorageError(
                f"table '{sorted(apart)[0]}' is looked up by a sequence, which needs CPU ranks (run.device: cpu). "
                "On a GPU pool it."
            )
        tables_of: dict[Format, list[TableConfig]] = {}
        for table in tables:
            tables_of.setdefault(Format.of(table, config.optimizer), []).append(table)
        check_optimizers((own.optimizer for own in tables_of), device)
        memories = [FormatMemory(own, of, config, device, allocate) for of, own in tables_of.items()]
        self._memory_of = {
            table.name: memory for memory, own in zip(memories, tables_of.values(), strict=True) for table in own
        }
        self._memories, self._device, self._pooling = memories, device, shared_pooling(tables)
        self._features, self._plain_loop, self._apart = features, plain_loop, frozenset(apart)
        self._process = os.getpid()
        self.in_pieces = memories[0].in_pieces
        self.lookups: list[FusedLookup] = []  # of tables that are looked up together
        self.lookups_apart: dict[Shard, FusedLookup] = {}
        self._held: tuple[Shard, ...] = ()
        self._sums = False
        self._claimed: set[Shard] = set()
        self._cache_is_newer = False
        self._updates = torch.zeros((), device=device, requires_grad=True)  # an input that makes autograd call backward

    @property
    def can_leave_device(self) -> bool:
        return not self.in_pieces and not self._memories[0].on_host("weight")

    def look_up(
        self, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None = None, *, training: bool = True
    ) -> Tensor:
        """Returns pooled vectors [B, D] of the held tables, without those apart; there must be some. weights_N: of the
        ids, if any. training: a backward pass follows."""
        assert self.lookups
        self._check_process()
        self._cache_is_newer = True
        training = training and torch.is_grad_enabled()
        if training and len(self.lookups) > 1:
            pooled: Tensor = _LookUpEach.apply(self._updates, self._look_up_each, values_N, offsets, weights_N)
            return pooled
        if len(self.lookups) == 1:
            pooled = self.lookups[0].look_up(values_N, offsets, weights_N, training=training)
        else:
            pooled = torch.cat(self._look_up_each(values_N, offsets, weights_N, training=training), 1)
        return pooled.requires_grad_() if training and not pooled.requires_grad else pooled  # frozen

    def _look_up_each(
        self, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None, *, training: bool
    ) -> list[Tensor]:
        """Looks up each format. On a GPU the host waits to learn where each format's ids begin."""
        parts = self._ids_of_each(values_N, offsets, weights_N)
        return [own.look_up(*ids, training=training) for own, ids in zip(self.lookups, parts, strict=True)]

    def _ids_of_each(self, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> list[Ids]:
        counts = [own.num_lookups for own in self.lookups]
        bags = (len(offsets) - 1) // sum(counts)
        cuts = [bags * count for count in itertools.accumulate(counts, initial=0)]
        starts, parts = offsets[cuts].tolist(), list[Ids]()
        for (first, last), (start, stop) in zip(itertools.pairwise(cuts), itertools.pairwise(starts), strict=True):
            weights = None if weights_N is None else weights_N[start:stop]
            parts.append((values_N[start:stop], offsets[first : last + 1] - start, weights))
        return parts

    def look_up_apart(self, name: Shard, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> Tensor:
        """Returns pooled vectors [bags, D] of a held shard of a table apart."""
        self._check_process()
        training = torch.is_grad_enabled()
        pooled = self.lookups_apart[name].look_up(values_N, offsets, weights_N, training=training)
        return pooled.requires_grad_() if training else pooled

    def prefetch(self, values_N: Tensor, offsets: Tensor) -> None:
        """Fetches rows from host memory into the GPU's cache for the next training lookup, if there is a cache."""
        if self.lookups and self.lookups[0].cache is not None and len(self.lookups) == 1:
            self.lookups[0].cache.prefetch(values_N, offsets)

    def take_back_lookup(self) -> None:
        """Undoes the last training lookup, which no backward pass will follow."""
        for own in self.lookups:
            if own.cache is not None:
                own.cache.take_back()

    def set_learning_rate(self, lr: float) -> None:
        for own in self._all_lookups:
            own.set_learning_rate(lr)

    def set_updates(self, updates: int) -> None:
        for own in self._all_lookups:
            own.set_updates(updates)

    def tensors(self, name: Shard) -> dict[str, Tensor]:
        """Returns live views {weight, momentum1, ...} of a held or claimed shard. StorageError for others, whose memory
        would be empty."""
        if name not in self._held and name not in self._claimed:
            raise StorageError(
                f"'{name}' is not on this rank, which holds {some_of(self._held) or 'nothing'}. Ask its owner "
                "under the plan."
            )
        self._check_process()
        self._flush()
        return self._memory(name).views(name)

    def table(self, name: Shard) -> TableConfig:
        """Returns the shard as a table."""
        return self._memory(name).table(name)

    def claim(self, names: Iterable[Shard]) -> str | None:
        """Takes places for arriving shards, in reserved memory if that is used. If there is no room, takes none and
        returns the reason."""
        names = list(names)
        try:
            for name in names if self.in_pieces else ():
                self._memory(name).places.of(name)
            self._claimed.update(names)
        except StorageError as error:
            self.give_up(names)
            return str(error)
        return None

    def give_up(self, names: Iterable[Shard]) -> None:
        """Frees what `claim` took, because these shards do not arrive."""
        for name in names:
            self._claimed.discard(name)
            self._memory(name).places.free(name)

    def shape(self, name: Shard, tensor: str) -> tuple[int, ...]:
        return self._memory(name).shape(name, tensor)

    def row_bytes(self, name: Shard) -> dict[str, tuple[int, int]]:
        """Returns (rows, bytes per row) of each tensor of a shard, on this rank or not."""
        return self._memory(name).row_bytes(name)

    def hold(self, names: Sequence[Shard], *, sums: bool = False) -> None:
        """Makes `names` the held shards. Those that arrived already have their values. sums: sum in the lookup
        regardless of the tables' pooling; the caller divides for means."""
        self._flush()
        self._claimed.difference_update(names)
        same_pooling, self._sums = sums == self._sums, sums
        if self._all_lookups and same_pooling and self._held == tuple(names):
            return  # others moved: keep the device's cache
        self.lookups, self.lookups_apart = [], {}  # frees their caches before new ones exist
        for name in set(self._held) - set(names):
            self._memory(name).release(name)
        self._held = tuple(names)
        for name in names:
            self.tensors(name)
        together = [name for name in names if name.table not in self._apart]
        self.lookups = [self._fused(list(own)) for _, own in itertools.groupby(together, self._memory)]
        self.lookups_apart = {name: self._fused([name]) for name in names if name not in together}

    def overwritten(self) -> None:
        """Call after writing into `tensors`: drops the rows that the device caches, now stale."""
        self._cache_is_newer = False
        for own in self.lookups:
            if own.cache is not None:
                own.cache.forget()

    def release_part(self, name: Shard, tensor: str, start: int, stop: int) -> None:
        """Frees bytes [start, stop) of a departing shard once they, and those before, have been sent."""
        self._memory(name).memory[tensor].release_part(name, start, stop)

    def leave_device(self, names: Iterable[Shard]) -> None:
        """Copies departing shards to host memory to make room for arriving ones. No lookups until `hold`."""
        self._flush()
        self.lookups, self.lookups_apart = [], {}
        for name in names:
            self._memory(name).to_host(name)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def bytes_of(self, names: Iterable[Shard]) -> dict[str, int]:
        """Returns bytes of these shards, without the cache: {"device": bytes, "host": bytes}."""
        sizes = [self._memory(name).bytes_of(name) for name in names]
        return {place: sum(size[place] for size in sizes) for place in ("device", "host")}

    def cache_bytes(self, names: Iterable[Shard]) -> int:
        """Returns bytes of the GPU's caches of rows; 0 unless weights are in host memory."""
        names = list(names)
        return sum(own.cache_bytes([name for name in names if self._memory(name) is own]) for own in self._memories)

    @property
    def _all_lookups(self) -> list[FusedLookup]:
        return [*self.lookups, *self.lookups_apart.values()]

    def _fused(self, names: Sequence[Shard]) -> FusedLookup:
        table_of = None if self._apart.issuperset(name.table for name in names) else self._table_of(names)
        pooling = "sum" if self._sums else self._pooling
        return FusedLookup(self._memory(names[0]), names, pooling, table_of, self._plain_loop)

    def _memory(self, name: Shard) -> FormatMemory:
        return self._memory_of[name.table]

    def _check_process(self) -> None:
        """Raises StorageError in a fork of the process that made this: it lacks the memory, and reads would kill it."""
        if self._process != os.getpid():
            raise StorageError(
                f"process {os.getpid()} is a fork of process {self._process}, which holds the tables: read them there "
                "and pass copies (`state_dict()` with each tensor cloned)."
            )

    def _flush(self) -> None:
        """Writes the cache's newer rows back to host memory, where `tensors` reads them; does nothing if unchanged."""
        if self._cache_is_newer:
            for own in self.lookups:
                own.tbe.flush()
        self._cache_is_newer = False

    def _table_of(self, names: Sequence[Shard]) -> list[int] | None:
        """Returns the index of each lookup's shard; None if each shard has one lookup."""
        if self._features is None:
            return None
        counts = [self._features[name.table] for name in names]
        return [number for number, count in enumerate(counts) for _ in range(count)]


class _LookUpEach(torch.autograd.Function):
    """Several fused lookups as one autograd node, whose backward pass ends when all their tables are updated."""

    @staticmethod
    def forward(ctx: Any, updates: Tensor, look_up_each: Any, *ids: Any) -> Tensor:
        """updates: unused, but makes autograd call `backward`."""
        with torch.enable_grad():
            ctx.parts = look_up_each(*ids, training=True)
        return torch.cat([part.detach() for part in ctx.parts], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BD: Tensor) -> tuple[None, ...]:
        parts, ctx.parts = ctx.parts, None
        gradients = gradient_BD.split([part.shape[1] for part in parts], 1)
        updated = {part: own.contiguous() for part, own in zip(parts, gradients, strict=True) if part.requires_grad}
        if updated:  # empty if all are frozen
            torch.autograd.backward(list(updated), list(updated.values()))
        return None, None, None, None, None


class Lost:
    """Replaces a Storage that has lost rows: any use raises StorageError with the reason."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise StorageError(self._why)


def shared_pooling(tables: Sequence[TableConfig]) -> Pooling:
    """Returns the pooling of a joint lookup: that of all tables, or sum if they differ (lookup/columns.py)."""
    poolings = {table.pooling for table in tables}
    return poolings.pop() if len(poolings) == 1 else "sum"
