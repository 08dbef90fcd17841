"""Memory behind the tables, each table's its own, so that a new plan moves nothing that stays.

memory.view("user")                    # [rows, dim], live; memory is taken where there was none
memory.release("user")
memory.addressed(["user", "item"])     # a flat tensor and where each table starts, counted from its first element
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dlrm_autoshard.errors import UserError

Shapes = Mapping[str, tuple[int, ...]]
Allocate = Callable[[int, torch.dtype], Tensor]
"""A flat tensor of so many elements."""

_ALIGN = 4096
"""Elements to which a table's place is aligned: whole pages for any dtype, and the same place, counted in elements, for
a weight and a state of its shape, which fbgemm's fp16 Adagrad on CPU takes for granted (it crashes otherwise)."""

_HUGE_PAGE = 1 << 21
_MAP_NORESERVE = 0x4000  # not in Python 3.10's mmap; the same number on every Linux that fbgemm runs on


class StorageError(UserError):
    """Tables that cannot be held: the message says which and why."""


class TableMemory(Protocol):
    """One tensor of every table: its weights, or one state of the optimizer."""

    def view(self, name: str) -> Tensor: ...

    def release(self, name: str) -> None: ...

    def release_part(self, name: str, start: int, stop: int) -> None:
        """Bytes [start, stop) are wanted no more; gives them back where memory can be had in pieces."""
        ...

    def addressed(self, names: Sequence[str]) -> tuple[Tensor, list[int]]: ...


class Reserved:
    """Host memory: address space for all tables, page-aligned, with no memory behind it until it is written."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        self._shapes, self._item = shapes, torch.empty((), dtype=dtype).element_size()
        self.offsets: dict[str, int] = {}  # in elements, as fbgemm counts them
        end = 0
        for name in shapes:
            self.offsets[name] = end
            end += self._extent(name)
        size = max(end, 1) * self._item
        try:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except OSError as error:
            raise StorageError(
                f"the system refuses to reserve {size / 2**30:.1f} GiB of address space for the tables "
                f"({error.strerror}). Lift `ulimit -v`, or set vm.overcommit_memory to 0 or 1."
            ) from error
        self.flat = torch.frombuffer(self._memory, dtype=dtype)
        for name in shapes:
            self._use_huge_pages(name)

    def view(self, name: str) -> Tensor:
        shape = self._shapes[name]
        start = self.offsets[name]
        return self.flat[start : start + torch.Size(shape).numel()].view(shape)

    def release(self, name: str) -> None:
        """Pages that are given back read as zeros."""
        self.release_part(name, 0, self._extent(name) * self._item)

    def release_part(self, name: str, start: int, stop: int) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED, self.offsets[name] * self._item + start, stop - start)

    def addressed(self, names: Sequence[str]) -> tuple[Tensor, list[int]]:
        return self.flat, [self.offsets[name] for name in names]

    def _use_huge_pages(self, name: str) -> None:
        """Rows lie at random places: with 4 KiB pages each costs a walk through the page tables (5% of the lookup and
        its backward). Only whole huge pages inside a table, so that a small table takes no more memory than it has."""
        first = self.flat.data_ptr()
        start = first + self.offsets[name] * self._item
        stop = start + torch.Size(self._shapes[name]).numel() * self._item
        start, stop = -(-start // _HUGE_PAGE) * _HUGE_PAGE, stop // _HUGE_PAGE * _HUGE_PAGE
        if stop > start:
            with contextlib.suppress(OSError, AttributeError):  # not every kernel or Python has them
                self._memory.madvise(mmap.MADV_HUGEPAGE, start - first, stop - start)

    def _extent(self, name: str) -> int:
        return -(-torch.Size(self._shapes[name]).numel() // _ALIGN) * _ALIGN


class Allocated:
    """Device memory, an allocation a table.

    fbgemm's kernels add a table's offset to the address of one tensor and check no bounds, so the offset may lead from
    one allocation to another.
    """

    def __init__(self, shapes: Shapes, dtype: torch.dtype, allocate: Allocate, *, zeros: bool) -> None:
        """zeros: what a table starts with; else anything."""
        self._shapes, self._dtype, self._allocate, self._zeros = shapes, dtype, allocate, zeros
        self._flat: dict[str, Tensor] = {}

    def view(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name not in self._flat:
            flat = self._allocate(torch.Size(shape).numel(), self._dtype)
            self._flat[name] = flat.zero_() if self._zeros else flat
        return self._flat[name].view(shape)

    def release(self, name: str) -> None:
        self._flat.pop(name, None)

    def release_part(self, name: str, start: int, stop: int) -> None: ...

    def to_host(self, name: str) -> None:
        """Of a table that leaves: frees its place on the device before it is sent."""
        self._flat[name] = self._flat[name].to("cpu", copy=True)

    def addressed(self, names: Sequence[str]) -> tuple[Tensor, list[int]]:
        tensors = [self._flat[name] for name in names]
        first = min(tensors, key=Tensor.data_ptr)
        return first, [(t.data_ptr() - first.data_ptr()) // self._dtype.itemsize for t in tensors]


def on_device(device: torch.device) -> Allocate:
    return lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device)


def on_host_for(device: torch.device) -> Allocate:
    """Host memory that the device reads and writes (CUDA's managed memory)."""
    return lambda numel, dtype: torch.ops.fbgemm.new_unified_tensor(
        torch.empty(1, dtype=dtype, device=device), [numel], False
    )
