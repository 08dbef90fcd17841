"""Where a rank's rows and optimizer state live, and the fused lookup (fbgemm's TBE) that reads and updates them.

On CPU every rank *reserves* address space for all tables of the model, each at a fixed place, and only pages of the
tables it owns are ever touched. A new plan then moves nothing that stays: arriving tables are received in place,
departing ones give their pages back, and the lookup is rebuilt from offsets alone in milliseconds.

On CUDA the memory is fbgemm's own (device or UVM cache), and a new plan rebuilds it through the host.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from dlrm_autoshard.config import TableOptimizerConfig
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.tables import TableConfig, TableDtype, TableOptimizer

_OPTIMIZERS = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
    "adam": EmbOptimType.ADAM,
}
_WEIGHTS = {"fp32": (SparseType.FP32, torch.float32), "fp16": (SparseType.FP16, torch.float16)}
_POOLING = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN}
_ALIGN = 4096
"""Elements to which a table's place is aligned: whole pages for any dtype, and the same place, counted in elements, for
a weight and a state of its shape, which fbgemm's fp16 Adagrad on CPU takes for granted (it crashes otherwise)."""

_HUGE_PAGE = 1 << 21
_MAP_NORESERVE = 0x4000  # not in Python 3.10's mmap; the same number on every Linux that fbgemm runs on


class StorageError(UserError):
    """Tables that cannot be held: the message says which and why."""


class Storage(Protocol):
    """`hold(names)` makes exactly these tables lookable, in this order; `tensors(name)` are views of its bytes."""

    lookup: SplitTableBatchedEmbeddingBagsCodegen | None

    def hold(self, names: Sequence[str]) -> None: ...

    def tensors(self, name: str) -> dict[str, Tensor]: ...

    def release_part(self, name: str, tensor: str, start: int, stop: int) -> None:
        """Bytes [start, stop) of a departing table have been sent: their memory is free for what arrives."""
        ...


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


class Reservation:
    """Address space for one tensor of every table, page-aligned, with no memory behind it until it is written."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
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

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Gives pages (all of the table's, or its bytes [start, stop)) back to the system; they then read as zeros."""
        stop = self._extent(name) * self._item if stop is None else stop
        self._memory.madvise(mmap.MADV_DONTNEED, self.offsets[name] * self._item + start, stop - start)

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


class HostStorage:
    """Tables in host memory at fixed addresses. One dtype for all tables, as one fused lookup has one."""

    def __init__(self, tables: Sequence[TableConfig], optimizer: TableOptimizerConfig) -> None:
        if optimizer.name == "adam":
            raise StorageError(
                "tables.optimizer.name 'adam' is for CUDA only; on CPU use rowwise_adagrad, adagrad or sgd."
            )
        self._tables = {table.name: table for table in tables}
        self._optimizer = optimizer
        self._dtype, self._pooling = shared_format(tables)
        self._weight = Reservation(
            {t.name: (t.num_embeddings, t.embedding_dim) for t in tables}, _WEIGHTS[self._dtype][1]
        )
        states: dict[str, dict[str, tuple[int, ...]]] = {}
        for table in tables:
            for state, shape in state_shapes(table, optimizer.name).items():
                states.setdefault(state, {})[table.name] = shape
        self._states = {state: Reservation(shapes, torch.float32) for state, shapes in states.items()}
        self._held: tuple[str, ...] = ()
        self.lookup: SplitTableBatchedEmbeddingBagsCodegen | None = None

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Live views {weight, momentum1, ...} of any table of the model, held or about to be."""
        return {"weight": self._weight.view(name), **{s: r.view(name) for s, r in self._states.items()}}

    def release_part(self, name: str, tensor: str, start: int, stop: int) -> None:
        (self._weight if tensor == "weight" else self._states[tensor]).release(name, start, stop)

    def hold(self, names: Sequence[str]) -> None:
        for name in set(self._held) - set(names):
            for reservation in (self._weight, *self._states.values()):
                reservation.release(name)
        self._held = tuple(names)
        self.lookup = self._build() if names else None

    def _build(self) -> SplitTableBatchedEmbeddingBagsCodegen:
        tables = [self._tables[name] for name in self._held]
        # Made with one row a table, so that it allocates nothing; then pointed at the reserved memory.
        tbe = make_tbe(
            [(1, t.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for t in tables],
            self._optimizer,
            self._dtype,
            self._pooling,
        )
        rows = torch.tensor([0] + [t.num_embeddings for t in tables])
        tbe.hash_size_cumsum = torch.cumsum(rows, 0)
        tbe.total_hash_size = int(rows.sum())
        tbe.total_hash_size_bits = tbe.total_hash_size.bit_length()
        tbe.rows_per_table = rows[1:]
        tbe.embedding_specs = [
            (t.num_embeddings, t.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for t in tables
        ]
        _point(tbe, "weights", self._weight, self._held)
        for state, reservation in self._states.items():
            _point(tbe, state, reservation, self._held)
        return tbe


class DeviceStorage:
    """Tables in fbgemm's own memory on a GPU; `managed_caching` keeps rows in host memory behind a device cache."""

    def __init__(
        self, tables: Sequence[TableConfig], optimizer: TableOptimizerConfig, device: torch.device, location: str
    ) -> None:
        self._tables = {table.name: table for table in tables}
        self._optimizer, self._device = optimizer, device
        self._dtype, self._pooling = shared_format(tables)
        self._location = (
            EmbeddingLocation.MANAGED_CACHING if location == "managed_caching" else EmbeddingLocation.DEVICE
        )
        self._staged: dict[str, dict[str, Tensor]] = {}
        self._held: tuple[str, ...] = ()
        self.lookup: SplitTableBatchedEmbeddingBagsCodegen | None = None

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Live device views of a held table; host buffers of a table about to be."""
        if name in self._held and self.lookup is not None:
            self.lookup.flush()  # the cache's newer rows, before anybody reads the backing memory
            index = self._held.index(name)
            states = self.lookup.split_optimizer_states() if self._optimizer.name != "sgd" else []
            names = state_shapes(self._tables[name], self._optimizer.name)
            values = states[index] if states else []
            return {"weight": self.lookup.split_embedding_weights()[index], **dict(zip(names, values, strict=True))}
        if name not in self._staged:
            table = self._tables[name]
            dtype = _WEIGHTS[self._dtype][1]
            self._staged[name] = {
                "weight": torch.empty(table.num_embeddings, table.embedding_dim, dtype=dtype),
                **{s: torch.zeros(shape) for s, shape in state_shapes(table, self._optimizer.name).items()},
            }
        return self._staged[name]

    def release_part(self, name: str, tensor: str, start: int, stop: int) -> None:
        """Nothing: fbgemm holds its tables in one piece, which goes when the lookup is rebuilt."""

    def hold(self, names: Sequence[str]) -> None:
        """Through the host, one layout at a time: needs no room on the device for two."""
        for name in self._held:
            if name in names:
                live = self.tensors(name)
                self._staged[name] = {key: value.to("cpu", copy=True) for key, value in live.items()}
        arriving = {name: self._staged.pop(name) for name in names if name in self._staged}
        self.lookup, self._held, self._staged = None, tuple(names), {}
        if not names:
            return
        torch.cuda.empty_cache()
        tables = [self._tables[name] for name in names]
        self.lookup = make_tbe(
            [(t.num_embeddings, t.embedding_dim, self._location, ComputeDevice.CUDA) for t in tables],
            self._optimizer,
            self._dtype,
            self._pooling,
            self._device,
        )
        for name, staged in arriving.items():
            live = self.tensors(name)
            for key, value in staged.items():
                live[key].copy_(value)
        if self._location is EmbeddingLocation.MANAGED_CACHING:
            self.lookup.reset_cache_states()  # it was filled behind the cache's back


def make_tbe(
    specs: list[tuple[int, int, EmbeddingLocation, ComputeDevice]],
    optimizer: TableOptimizerConfig,
    dtype: TableDtype,
    pooling: str,
    device: torch.device | None = None,
) -> SplitTableBatchedEmbeddingBagsCodegen:
    return SplitTableBatchedEmbeddingBagsCodegen(
        specs,
        optimizer=_OPTIMIZERS[optimizer.name],
        learning_rate=optimizer.lr,
        eps=optimizer.eps,
        weights_precision=_WEIGHTS[dtype][0],
        pooling_mode=_POOLING[pooling],
        # The loader has checked every id and names table and sample; TBE's own check would cost 15% of a lookup.
        bounds_check_mode=BoundsCheckMode.NONE,
        # Rounding fp16 weights at random would make a run depend on how its tables are grouped.
        stochastic_rounding=False,
        device=device,
    )


def shared_format(tables: Sequence[TableConfig]) -> tuple[TableDtype, str]:
    formats = {(table.dtype, table.pooling) for table in tables}
    if len(formats) != 1:
        raise StorageError(f"all tables must share one dtype and pooling; these have {sorted(formats)}.")
    return formats.pop()


def _point(tbe: Any, name: str, reservation: Reservation, held: Sequence[str]) -> None:
    offsets = [reservation.offsets[table] for table in held]
    setattr(tbe, f"{name}_host", torch.nn.Parameter(reservation.flat))
    setattr(tbe, f"{name}_offsets", torch.tensor(offsets))
    setattr(tbe, f"{name}_physical_offsets", offsets)
