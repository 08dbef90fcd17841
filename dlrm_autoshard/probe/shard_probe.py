"""Times one shard's fused lookup and fused backward + update on throwaway tables: the micro-benchmark's core.

    probe = ShardProbe("rowwise_adagrad")
    time = probe.measure(tables, stats, batch_size=4096)     # any number of tables, none included
    time.fwd_compute_ms, time.bwd_compute_ms                 # medians; `noise` is their relative spread

Real tables are never touched (a probing backward would train them). On CPU throwaway tables are windows, at different
places, of one resident buffer: measuring a shard of 50 GiB takes no 50 GiB, and pages are faulted in once, not for
every shard. Ids are scattered over a table, so windows that overlap share next to no hot rows.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm_autoshard.distributed.runtime import keep_freed_memory
from dlrm_autoshard.probe.drawn_ids import IdSource, draw_ids
from dlrm_autoshard.tables import TableConfig, TableOptimizer, TableStats

_MOST_CACHED_IDS = 100_000_000  # drawn ids kept for the next shard with the same table (400 MB)
_ALIGN = 4096  # elements; real tables start at whole pages too


@dataclass(frozen=True)
class ShardTime:
    """Medians over `repeats` timed steps; noise: the larger of the two interquartile ranges / median."""

    fwd_compute_ms: float = 0.0
    bwd_compute_ms: float = 0.0
    noise: float = 0.0
    repeats: int = 0


class ShardProbe:
    """Measures shards on one device; buffers and drawn ids are kept from one shard to the next.

    ids: what is looked up; the default draws ids that repeat as the statistics say.
    buffer_gib: memory for throwaway weights; a table that is larger is measured with as many rows as fit.
    warmup, repeats, seconds_per_shard: at least `repeats` timed steps, up to four times as many while there is time.
    draws: batches that take turns, so that no shard is timed on rows that its last step left in the cache: with two
        draws a table of 5 MiB a batch looked 40% cheaper than with eight, with four it does not.
    undisturbed: steps during which another process took this core are timed again (CPU only; for isolated mode,
        which asks what the shard itself takes). On running ranks such steps count: ranks may have to share cores.
    """

    def __init__(
        self,
        optimizer: TableOptimizer = "rowwise_adagrad",
        device: torch.device = torch.device("cpu"),
        ids: IdSource = draw_ids,
        buffer_gib: float = 1.0,
        warmup: int = 4,
        repeats: int = 5,
        seconds_per_shard: float = 0.25,
        draws: int = 4,
        undisturbed: bool = False,
    ) -> None:
        self.optimizer: TableOptimizer = optimizer
        self.device = device
        self.warmup, self.repeats, self.seconds_per_shard, self.draws = warmup, repeats, seconds_per_shard, draws
        self.undisturbed = undisturbed and device.type == "cpu"
        self._ids = ids
        self._buffer_bytes = int(buffer_gib * 2**30)
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._drawn: OrderedDict[Any, tuple[Tensor, Tensor]] = OrderedDict()
        self._num_drawn = 0
        if device.type == "cpu":
            keep_freed_memory()  # as the trainer does: else every step pages its pooled vectors in anew

    def measure(self, tables: Sequence[TableConfig], stats: Sequence[TableStats], batch_size: int) -> ShardTime:
        """Time of the tables fused on one rank, for the global batch; an empty shard takes none."""
        if not tables:
            return ShardTime()
        # In the order of the trainer's fused lookup: by dim.
        order = sorted(range(len(tables)), key=lambda i: tables[i].embedding_dim)
        tables, stats = [tables[i] for i in order], [stats[i] for i in order]
        rows = [self._rows(table, len(tables)) for table in tables]
        module = self._module(tables, rows)
        batches = [self._batch(tables, stats, rows, batch_size, draw) for draw in range(self.draws)]
        gradient = torch.full((batch_size, sum(table.embedding_dim for table in tables)), 1e-3, device=self.device)
        forward, backward = self._timed_steps(module, batches, gradient)
        return ShardTime(
            fwd_compute_ms=float(np.median(forward)),
            bwd_compute_ms=float(np.median(backward)),
            noise=max(relative_spread(forward), relative_spread(backward)),
            repeats=len(forward),
        )

    def _timed_steps(
        self, module: Any, batches: Sequence[tuple[Tensor, Tensor]], gradient: Tensor
    ) -> tuple[list[float], list[float]]:
        """ms of lookups, and of backward + update, step by step."""
        forward: list[float] = []
        backward: list[float] = []
        started, step, disturbed = time.perf_counter(), 0, 0
        while len(forward) < self.repeats or (
            len(forward) < 4 * self.repeats and time.perf_counter() < started + self.seconds_per_shard
        ):
            start, start_cpu = self._now(), time.thread_time()
            pooled = module(*batches[step % self.draws])
            middle = self._now()
            pooled.backward(gradient)
            end, cpu = self._now(), time.thread_time() - start_cpu
            step += 1
            if step <= self.warmup:
                continue
            if self.undisturbed and cpu < 0.97 * (end - start) - 2e-5 and disturbed < 10 * self.repeats:
                disturbed += 1
                continue
            forward.append(1e3 * (middle - start))
            backward.append(1e3 * (end - middle))
        return forward, backward

    def _batch(
        self,
        tables: Sequence[TableConfig],
        stats: Sequence[TableStats],
        rows: Sequence[int],
        batch_size: int,
        draw: int,
    ) -> tuple[Tensor, Tensor]:
        """Ids and bag offsets of all tables, table-major, as fbgemm takes them."""
        drawn = [self._drawn_ids(table, stat, batch_size, draw) for table, stat in zip(tables, stats, strict=True)]
        offsets = torch.zeros(len(tables) * batch_size + 1, dtype=torch.int32)
        torch.cumsum(torch.cat([lengths_B for lengths_B, _ in drawn]), 0, out=offsets[1:])
        ids = [
            ids_N % count if count < table.num_embeddings else ids_N
            for table, count, (_, ids_N) in zip(tables, rows, drawn, strict=True)
        ]
        return torch.cat(ids).to(self.device), offsets.to(self.device)

    def _drawn_ids(self, table: TableConfig, stats: TableStats, batch_size: int, draw: int) -> tuple[Tensor, Tensor]:
        """Lengths and ids of one table, remembered between shards."""
        key = (table.name, table.num_embeddings, stats, batch_size, draw)
        if key not in self._drawn:
            lengths_B, ids_N = self._ids(table, stats, batch_size, draw)
            if len(lengths_B) != batch_size:
                raise ValueError(f"ids for table '{table.name}' have {len(lengths_B)} bags; {batch_size} are needed.")
            self._drawn[key] = torch.from_numpy(lengths_B), torch.from_numpy(ids_N.astype(np.int32))
            self._num_drawn += len(ids_N)
            while self._num_drawn > _MOST_CACHED_IDS and len(self._drawn) > 1:
                _, (_, oldest) = self._drawn.popitem(last=False)
                self._num_drawn -= len(oldest)
        self._drawn.move_to_end(key)
        return self._drawn[key]

    def _rows(self, table: TableConfig, num_tables: int) -> int:
        """Rows with which the table is measured: all, if the memory allows."""
        room = self._buffer_bytes if self.device.type == "cpu" else self._buffer_bytes // num_tables
        bytes_per_row = table.weight_bytes // table.num_embeddings
        return max(1, min(table.num_embeddings, room // bytes_per_row, 2**31 - 1))

    def _module(self, tables: Sequence[TableConfig], rows: Sequence[int]) -> Any:
        from dlrm_autoshard.config import TableOptimizerConfig
        from dlrm_autoshard.distributed.storage import ComputeDevice, EmbeddingLocation, make_tbe, shared_format

        dtype, pooling = shared_format(tables)
        optimizer = TableOptimizerConfig(name=self.optimizer, lr=1e-6)
        dims = [table.embedding_dim for table in tables]
        if self.device.type == "cuda":
            specs = [
                (count, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
                for count, dim in zip(rows, dims, strict=True)
            ]
            return make_tbe(specs, optimizer, dtype, pooling, self.device)
        module = make_tbe(
            [(1, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for dim in dims], optimizer, dtype, pooling
        )
        self._open_windows(module, dims, rows, torch.float16 if dtype == "fp16" else torch.float32)
        return module

    def _open_windows(self, module: Any, dims: Sequence[int], rows: Sequence[int], dtype: torch.dtype) -> None:
        """Points a module of one-row tables at windows of the resident buffers, with the real numbers of rows."""
        weights, starts = self._windows(dtype, [count * dim for count, dim in zip(rows, dims, strict=True)], "weights")
        ends = torch.cumsum(torch.tensor([0, *rows]), 0)
        module.hash_size_cumsum = ends
        module.total_hash_size = int(ends[-1])
        module.total_hash_size_bits = module.total_hash_size.bit_length()
        module.rows_per_table = torch.tensor(rows)
        _point(module, "weights", weights, starts)
        if self.optimizer == "adagrad":  # its state has the weights' shape, and must have their offsets
            _point(module, "momentum1", self._buffer("state", torch.float32, weights.numel()), starts)
        elif self.optimizer == "rowwise_adagrad":
            _point(module, "momentum1", *self._windows(torch.float32, rows, "state"))

    def _windows(self, dtype: torch.dtype, sizes: Sequence[int], kind: str) -> tuple[Tensor, list[int]]:
        """A resident buffer that holds the largest window, and where each window starts in it."""
        generator = np.random.default_rng(len(sizes))
        buffer = self._buffer(kind, dtype, max(sizes))
        return buffer, [_ALIGN * int(generator.integers(0, (buffer.numel() - size) // _ALIGN + 1)) for size in sizes]

    def _buffer(self, kind: str, dtype: torch.dtype, elements: int) -> Tensor:
        """The resident buffer of a kind, grown to `elements`; its values only have to be finite."""
        have = self._buffers.pop((kind, dtype), torch.empty(0, dtype=dtype))
        if have.numel() < elements:
            size = max(elements, min(2 * have.numel(), self._buffer_bytes // dtype.itemsize))
            del have
            have = torch.full((size,), 1e-3, dtype=dtype)
        self._buffers[kind, dtype] = have
        return have

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _point(module: Any, name: str, buffer: Tensor, starts: Sequence[int]) -> None:
    setattr(module, f"{name}_host", torch.nn.Parameter(buffer, requires_grad=name == "weights"))
    setattr(module, f"{name}_offsets", torch.tensor(starts))
    setattr(module, f"{name}_physical_offsets", list(starts))


def relative_spread(values: Sequence[float]) -> float:
    """Interquartile range / median."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return float((high - low) / median) if median > 0 else 0.0
