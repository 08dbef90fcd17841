"""Memory behind the shards, each shard's its own, so that a new plan moves nothing that stays: `Reserved` on the host,
`Allocated` on a device. Each is of one tensor of every table: its weights, or one state of the optimizer.

memory.view("user")                    # [rows, dim], live; memory is taken where there was none
memory.release("user")
memory.addressed(["user", "item"])     # a flat tensor and where each table starts, counted from its first element
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.tables import Shard, TableConfig

ShapeOf = Callable[[str], tuple[int, ...]]
Allocate = Callable[[int, torch.dtype], Tensor]
"""A flat tensor of so many elements."""

_ALIGN = 4096
"""Elements to which a shard's place is aligned: whole pages for any dtype."""
_LAYERS = 4
_CUTS = 64
"""Ranges of rows in which there is room for a rank's parts."""
_PAGE = 4096
_HUGE_PAGE = 1 << 21
_MAP_NORESERVE = 0x4000  # not in Python 3.10's mmap; the same number on every Linux that fbgemm runs on


class StorageError(UserError):
    """Tables that cannot be held: the message says which and why."""


class Places:
    """Where each shard lies in reserved memory, counted in elements: alike for a weight and the states of its shape,
    which fbgemm's fp16 Adagrad on CPU takes for granted (it crashes otherwise).

    Every table has a place for itself whole, and room for `_LAYERS` times its parts: a new part goes to the first gap
    that it fits in, so that old and new parts exist at once while tables are resplit.
    """

    def __init__(self, tables: Sequence[TableConfig]) -> None:
        self._tables = {table.name: table for table in tables}
        self._first: dict[str, int] = {}
        self._taken: dict[str, dict[str, tuple[int, int]]] = {table.name: {} for table in tables}
        self.end = 0
        for table in tables:
            self._first[table.name] = self.end
            self.end += _aligned(table.num_embeddings * table.embedding_dim)
        self._parts = {}
        for table in tables:
            first, self.end = self.end, self.end + _LAYERS * self._room(table)
            self._parts[table.name] = first, self.end

    def of(self, name: Shard) -> int:
        if name in self._first:
            return self._first[name]
        taken, table = self._taken[name.table], self._tables[name.table]
        if name not in taken:
            part = table.holding(name)
            size = _aligned(part.num_embeddings * part.embedding_dim)
            place, end = self._parts[table.name]
            for start, stop in sorted(taken.values()):
                if place + size <= start:
                    break
                place = stop
            if place + size > end:
                raise StorageError(f"table '{table.name}' is split anew too often at once: move it whole first.")
            taken[name] = (place, place + size)
        return taken[name][0]

    def free(self, name: Shard) -> None:
        self._taken[name.table].pop(name, None)

    @staticmethod
    def _room(table: TableConfig) -> int:
        """For all of its parts, each in whole pages, however it is split."""
        return _aligned(table.num_embeddings * table.embedding_dim) + (table.embedding_dim // 4 + _CUTS) * _ALIGN


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGN) * _ALIGN


class Reserved:
    """Host memory: address space for all tables, page-aligned, with no memory behind it until it is written."""

    def __init__(self, shape_of: ShapeOf, dtype: torch.dtype, places: Places) -> None:
        self._shape_of, self._item, self._places = shape_of, torch.empty((), dtype=dtype).element_size(), places
        size = max(places.end, 1) * self._item
        try:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except OSError as error:
            raise StorageError(
                f"the system refuses to reserve {size / 2**30:.1f} GiB of address space for the tables "
                f"({error.strerror}). Lift `ulimit -v`, or set vm.overcommit_memory to 0 or 1."
            ) from error
        self._memory.madvise(mmap.MADV_DONTFORK)  # a forked data loader would keep each page that training then writes
        self.flat = torch.frombuffer(self._memory, dtype=dtype)
        self._huge: set[str] = set()

    def view(self, name: Shard) -> Tensor:
        shape, start = self._shape_of(name), self._places.of(name)
        if name not in self._huge:
            self._huge.add(name)
            self._use_huge_pages(start, torch.Size(shape).numel())
        return torch.frombuffer(
            self._memory, dtype=self.flat.dtype, count=torch.Size(shape).numel(), offset=start * self._item
        ).view(shape)  # not of `flat`, whose storage is all tables: torch.save writes a tensor's whole storage

    def release(self, name: Shard) -> None:
        """Pages that are given back read as zeros."""
        self._huge.discard(name)
        extent = _aligned(torch.Size(self._shape_of(name)).numel()) * self._item
        self._memory.madvise(mmap.MADV_DONTNEED, self._places.of(name) * self._item, extent)

    def release_part(self, name: Shard, start: int, stop: int) -> None:
        """Bytes [start, stop), and those before, are wanted no more."""
        start, stop = start // _PAGE * _PAGE, stop // _PAGE * _PAGE
        if start < stop:
            self._memory.madvise(mmap.MADV_DONTNEED, self._places.of(name) * self._item + start, stop - start)

    def addressed(self, names: Sequence[Shard]) -> tuple[Tensor, list[int]]:
        return self.flat, [self._places.of(name) for name in names]

    def _use_huge_pages(self, place: int, elements: int) -> None:
        """Rows lie at random places: with 4 KiB pages each costs a walk through the page tables (5% of the lookup and
        its backward). Only whole huge pages inside a table, so that a small table takes no more memory than it has."""
        first = self.flat.data_ptr()
        start = first + place * self._item
        stop = start + elements * self._item
        start, stop = -(-start // _HUGE_PAGE) * _HUGE_PAGE, stop // _HUGE_PAGE * _HUGE_PAGE
        if stop > start:
            _advise_huge_pages(self._memory, start - first, stop - start)


def in_huge_pages(elements: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor on the host, in pages as large tables are in."""
    memory = mmap.mmap(-1, elements * dtype.itemsize + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise_huge_pages(memory, 0, len(memory))
    flat = torch.frombuffer(memory, dtype=dtype)
    start = -flat.data_ptr() % _HUGE_PAGE // dtype.itemsize
    return flat[start : start + elements]


def _advise_huge_pages(memory: mmap.mmap, start: int, length: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not every kernel or Python has them
        memory.madvise(mmap.MADV_HUGEPAGE, start, length)


class Allocated:
    """Device memory, an allocation a shard.

    fbgemm's kernels add a table's offset to the address of one tensor and check no bounds, so the offset may lead from
    one allocation to another.
    """

    def __init__(self, shape_of: ShapeOf, dtype: torch.dtype, allocate: Allocate, *, zeros: bool) -> None:
        """zeros: what a shard starts with; else anything."""
        self._shape_of, self._dtype, self._allocate, self._zeros = shape_of, dtype, allocate, zeros
        self._flat: dict[str, Tensor] = {}

    def view(self, name: Shard) -> Tensor:
        shape = self._shape_of(name)
        if name not in self._flat:
            flat = self._allocate(torch.Size(shape).numel(), self._dtype)
            self._flat[name] = flat.zero_() if self._zeros else flat
        return self._flat[name].view(shape)

    def release(self, name: Shard) -> None:
        self._flat.pop(name, None)

    def release_part(self, name: Shard, start: int, stop: int) -> None:
        """Nothing: an allocation goes as a whole."""

    def to_host(self, name: Shard) -> None:
        """Moves a leaving table to the host: frees its place on the device before it is sent."""
        self._flat[name] = self._flat[name].to("cpu", copy=True)

    def addressed(self, names: Sequence[Shard]) -> tuple[Tensor, list[int]]:
        tensors = [self._flat[name] for name in names]
        first = min(tensors, key=Tensor.data_ptr)
        return first, [(t.data_ptr() - first.data_ptr()) // self._dtype.itemsize for t in tensors]


def on_device(device: torch.device) -> Allocate:
    """Allocates on a device."""
    return lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device)


def on_host_for(device: torch.device) -> Allocate:
    """Host memory that the device reads and writes (CUDA's managed memory)."""
    return lambda numel, dtype: torch.ops.fbgemm.new_unified_tensor(
        torch.empty(1, dtype=dtype, device=device), [numel], False
    )
