"""Memory of each shard, for one tensor: `Reserved` on the host, `Allocated` on a device. A move copies nothing else.

memory.view("user")                    # [rows, dim], live; allocates at the first call
memory.release("user")
memory.addressed(["user", "item"])     # a flat tensor, and where each table starts in it, in elements
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
"""Returns a flat tensor of this many elements."""

_ALIGN = 4096
"""Alignment of a shard's place in elements: whole pages for any dtype."""
_LAYERS = 4
_CUTS = 64
"""Row ranges of a table for which there is room."""
_PAGE = 4096
_HUGE_PAGE = 1 << 21
_MAP_NORESERVE = 0x4000  # not in Python 3.10's mmap; the same number on every Linux that fbgemm runs on


class StorageError(UserError):
    """Tables cannot be held, or read; the message says which and why."""


class Places:
    """Assigns each shard a place in reserved memory, in elements. Weights and states of the same shape share the place,
    because fbgemm's fp16 Adagrad on CPU crashes otherwise.

    Every table has a place for itself whole, and room for `_LAYERS` times its parts. A new part goes to the first gap
    that fits, so that old and new parts coexist while tables are split again.
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
                raise StorageError(
                    f"table '{table.name}' is split again while too many of its old parts remain: move it whole first."
                )
            taken[name] = (place, place + size)
        return taken[name][0]

    def free(self, name: Shard) -> None:
        self._taken[name.table].pop(name, None)

    @staticmethod
    def _room(table: TableConfig) -> int:
        """Returns elements for all parts of a table under any split, each in whole pages."""
        return _aligned(table.num_embeddings * table.embedding_dim) + (table.embedding_dim // 4 + _CUTS) * _ALIGN


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGN) * _ALIGN


class Reserved:
    """Host memory: page-aligned address space for all tables, which takes memory only once it is written."""

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
        self._memory.madvise(
            mmap.MADV_DONTFORK
        )  # else a forked data loader keeps a copy of each page that training writes
        self.flat = torch.frombuffer(self._memory, dtype=dtype)
        self._huge: set[str] = set()

    def view(self, name: Shard) -> Tensor:
        shape, start = self._shape_of(name), self._places.of(name)
        if name not in self._huge:
            self._huge.add(name)
            self._use_huge_pages(start, torch.Size(shape).numel())
        return torch.frombuffer(
            self._memory, dtype=self.flat.dtype, count=torch.Size(shape).numel(), offset=start * self._item
        ).view(shape)  # not a view of `flat`: torch.save would write its whole storage, all tables

    def release(self, name: Shard) -> None:
        """Frees the shard's pages, which then read as zeros."""
        self._huge.discard(name)
        extent = _aligned(torch.Size(self._shape_of(name)).numel()) * self._item
        self._memory.madvise(mmap.MADV_DONTNEED, self._places.of(name) * self._item, extent)

    def release_part(self, name: Shard, start: int, stop: int) -> None:
        """Frees bytes [start, stop), once those before are freed."""
        start, stop = start // _PAGE * _PAGE, stop // _PAGE * _PAGE
        if start < stop:
            self._memory.madvise(mmap.MADV_DONTNEED, self._places.of(name) * self._item + start, stop - start)

    def addressed(self, names: Sequence[Shard]) -> tuple[Tensor, list[int]]:
        return self.flat, [self._places.of(name) for name in names]

    def _use_huge_pages(self, place: int, elements: int) -> None:
        """Advises huge pages, because with 4 KiB pages each random row costs a walk through the page tables (5% of the
        lookup and its backward). Only for whole huge pages inside a table, so that small tables take no more memory."""
        first = self.flat.data_ptr()
        start = first + place * self._item
        stop = start + elements * self._item
        start, stop = -(-start // _HUGE_PAGE) * _HUGE_PAGE, stop // _HUGE_PAGE * _HUGE_PAGE
        if stop > start:
            _advise_huge_pages(self._memory, start - first, stop - start)


def in_huge_pages(elements: int, dtype: torch.dtype) -> Tensor:
    """Returns a flat tensor on the host in huge pages, like large tables."""
    memory = mmap.mmap(-1, elements * dtype.itemsize + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise_huge_pages(memory, 0, len(memory))
    flat = torch.frombuffer(memory, dtype=dtype)
    start = -flat.data_ptr() % _HUGE_PAGE // dtype.itemsize
    return flat[start : start + elements]


def _advise_huge_pages(memory: mmap.mmap, start: int, length: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # missing in some kernels and Pythons
        memory.madvise(mmap.MADV_HUGEPAGE, start, length)


class Allocated:
    """Device memory, one allocation per shard.

    fbgemm's kernels add a table's offset to one tensor's address without a bounds check, so the offset may lead to
    another allocation.
    """

    def __init__(self, shape_of: ShapeOf, dtype: torch.dtype, allocate: Allocate, *, zeros: bool) -> None:
        """zeros: fill new shards with zeros; else uninitialized."""
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
        """Does nothing: an allocation is freed as a whole."""

    def to_host(self, name: Shard) -> None:
        """Copies a departing shard to the host, which frees its device memory before it is sent."""
        self._flat[name] = self._flat[name].to("cpu", copy=True)

    def addressed(self, names: Sequence[Shard]) -> tuple[Tensor, list[int]]:
        tensors = [self._flat[name] for name in names]
        first = min(tensors, key=Tensor.data_ptr)
        return first, [(t.data_ptr() - first.data_ptr()) // self._dtype.itemsize for t in tensors]


def on_device(device: torch.device) -> Allocate:
    """Returns an allocator of device memory."""
    return lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device)


def on_host_for(device: torch.device) -> Allocate:
    """Returns an allocator of host memory that the device reads and writes (CUDA's managed memory)."""
    return lambda numel, dtype: torch.ops.fbgemm.new_unified_tensor(
        torch.empty(1, dtype=dtype, device=device), [numel], False
    )
