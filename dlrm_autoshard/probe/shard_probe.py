"""Times one shard's fused lookup and fused backward + update on throwaway tables.

probe = ShardProbe("rowwise_adagrad")
time = probe.measure(tables, stats, batch_size=4096)     # any number of tables, also none
time.fwd_compute_ms, time.bwd_compute_ms                 # medians; `noise` is their relative spread
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm_autoshard.config import TableOptimizerConfig
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory
from dlrm_autoshard.distributed.tables.memory import in_huge_pages
from dlrm_autoshard.distributed.tables.storage import shared_pooling
from dlrm_autoshard.distributed.tables.tbe import make_tbe
from dlrm_autoshard.optimizers import OPTIMIZERS
from dlrm_autoshard.probe.drawn_ids import draw_ids
from dlrm_autoshard.probe.step_timer import StepTimer
from dlrm_autoshard.tables import TableConfig, TableOptimizer, TableStats, output_order

_ALIGN = 4096  # elements; real tables start at whole pages too
_DRAWS = 4
"""Batches used in rotation, so that rows are not still cached from the last step. With two a table of 5 MiB a batch
looked 40% cheaper than with eight; with four it does not."""

DrawnIds = tuple[Tensor, Tensor]
"""One table's bag lengths and ids in one batch."""


@dataclass(frozen=True)
class ShardTime:
    """Median ms over `repeats` timed steps; noise: the larger of both interquartile ranges / median.

    If other processes use the core, each step counts as if it had waited as long as the average step (`StepTimer`)."""

    fwd_compute_ms: float = 0.0
    bwd_compute_ms: float = 0.0
    noise: float = 0.0
    repeats: int = 0


class ShardProbe:
    """Measures shards on one device, with ids that repeat as the statistics say. Keeps buffers and drawn ids between
    shards.

    buffer_gib: memory for throwaway weights; of larger tables only looked-up rows have a place.
    warmup, warmup_seconds, repeats, seconds_per_shard, undisturbed: as in `StepTimer`. Use undisturbed in a single
    process, to measure the shard itself; running ranks may have to share cores.
    most_kept_ids: drawn ids kept on the device for later shards with the same table (400 MB).

    Real tables are never touched, as a probing backward would train them. Throwaway tables are windows at random places
    of one resident buffer: a shard of 50 GiB needs no 50 GiB, and pages are faulted in once. Ids are scattered over a
    window, so overlapping windows share almost no hot rows.
    """

    def __init__(
        self,
        optimizer: TableOptimizer = "rowwise_adagrad",
        device: torch.device = torch.device("cpu"),
        buffer_gib: float = 1.0,
        warmup: int = 4,
        warmup_seconds: float = math.inf,
        repeats: int = 5,
        seconds_per_shard: float = 0.25,
        undisturbed: bool = False,
        most_kept_ids: int = 100_000_000,
    ) -> None:
        self.optimizer: TableOptimizer = optimizer
        self.device = device
        self._timer = StepTimer(
            device,
            warmup=warmup,
            warmup_seconds=warmup_seconds,
            repeats=repeats,
            seconds=seconds_per_shard,
            undisturbed=undisturbed,
        )
        self._most_kept_ids = most_kept_ids
        self._buffer_bytes = int(buffer_gib * 2**30)
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._drawn: OrderedDict[Any, list[DrawnIds]] = OrderedDict()
        self._num_drawn = 0
        if device.type == "cpu":
            keep_freed_memory()  # as in training: otherwise every step faults in its pooled vectors again

    def measure(
        self,
        tables: Sequence[TableConfig],
        stats: Sequence[TableStats],
        batch_size: int,
        wholes: Sequence[TableConfig] | None = None,
    ) -> ShardTime:
        """Returns the time of the tables fused on one rank at the global batch size; zero for an empty shard.

        wholes: the tables that these are column shards of. A shard gets as many rows of the buffer as its whole table
        would, so that their times compare."""
        if not tables:
            return ShardTime()
        formats = [(table.dtype, table.optimizer and table.optimizer.name) for table in tables]
        if len(set(formats)) > 1:  # fbgemm needs a lookup per format
            of_each = [[i for i, other in enumerate(formats) if other == own] for own in dict.fromkeys(formats)]
            wholes = wholes or tables
            times = [
                self.measure([tables[i] for i in o], [stats[i] for i in o], batch_size, [wholes[i] for i in o])
                for o in of_each
            ]
            forward, backward = (sum(getattr(time, f"{way}_compute_ms") for time in times) for way in ("fwd", "bwd"))
            return ShardTime(forward, backward, max(time.noise for time in times), min(time.repeats for time in times))
        order = output_order(tables)  # as in the trainer's fused lookup
        rows = [self._rows((wholes or tables)[i]) for i in order]
        tables, stats = [tables[i] for i in order], [stats[i] for i in order]
        module = self._module(tables, rows)
        batches = self._batches(tables, stats, rows, batch_size)
        gradient = torch.full((batch_size, sum(table.embedding_dim for table in tables)), 1e-3, device=self.device)
        forward, backward = self._timer.ms(module, batches, gradient)
        return ShardTime(
            fwd_compute_ms=float(np.median(forward)),
            bwd_compute_ms=float(np.median(backward)) if OPTIMIZERS[self._optimizer_of(tables)].updates else 0.0,
            noise=max(relative_spread(forward), relative_spread(backward)),
            repeats=len(forward),
        )

    def _batches(
        self, tables: Sequence[TableConfig], stats: Sequence[TableStats], rows: Sequence[int], batch_size: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns each draw's ids and bag offsets of all tables, table-major, as fbgemm takes them."""
        lengths: list[list[Tensor]] = [[] for _ in range(_DRAWS)]
        ids: list[list[Tensor]] = [[] for _ in range(_DRAWS)]
        for table, stat, count in zip(tables, stats, rows, strict=True):
            for draw, (lengths_B, ids_N) in enumerate(self._drawn_ids(table, stat, count, batch_size)):
                lengths[draw].append(lengths_B)
                ids[draw].append(ids_N)
        batches = []
        for draw in range(_DRAWS):
            offsets = torch.zeros(len(tables) * batch_size + 1, dtype=torch.int32, device=self.device)
            torch.cumsum(torch.cat(lengths[draw]), 0, out=offsets[1:])
            batches.append((torch.cat(ids[draw]), offsets))
        return batches

    def _drawn_ids(self, table: TableConfig, stats: TableStats, rows: int, batch_size: int) -> list[DrawnIds]:
        """Returns one table's ids of each draw, mapped to `rows` rows; remembered between shards."""
        key = (table.shard.table, table.num_embeddings, stats, rows, batch_size)
        if key not in self._drawn:
            drawn = [draw_ids(table, stats, batch_size, draw) for draw in range(_DRAWS)]
            ids = [torch.from_numpy(ids_N.astype(np.int32)) for _, ids_N in drawn]
            if rows < table.num_embeddings:
                ids = in_fewer_rows(ids, rows)
            lengths = [torch.from_numpy(lengths_B) for lengths_B, _ in drawn]
            self._drawn[key] = [(a.to(self.device), b.to(self.device)) for a, b in zip(lengths, ids, strict=True)]
            self._num_drawn += sum(map(len, ids))
            while self._num_drawn > self._most_kept_ids and len(self._drawn) > 1:
                _, oldest = self._drawn.popitem(last=False)
                self._num_drawn -= sum(len(ids_N) for _, ids_N in oldest)
        self._drawn.move_to_end(key)
        return self._drawn[key]

    def _rows(self, table: TableConfig) -> int:
        """Returns the number of rows that the table's window holds: all, if memory allows."""
        bytes_per_row = table.weight_bytes // table.num_embeddings
        return max(1, min(table.num_embeddings, self._buffer_bytes // bytes_per_row, 2**31 - 1))

    def _module(self, tables: Sequence[TableConfig], rows: Sequence[int]) -> Any:
        """Makes the TBE on windows of the resident buffers.

        On GPU it is given the tables' true numbers of rows, whose bits determine the sort; on CPU backward would need
        memory for each of them."""
        dtype, pooling = tables[0].dtype, shared_pooling(tables)
        shown = rows if self.device.type == "cpu" else [table.num_embeddings for table in tables]
        shapes = [(count, table.embedding_dim) for count, table in zip(shown, tables, strict=True)]
        sizes = [count * table.embedding_dim for count, table in zip(rows, tables, strict=True)]
        weights, starts = self._windows(torch.float16 if dtype == "fp16" else torch.float32, sizes, "weights")
        memory = {"weights": (weights, starts)}
        optimizer = self._optimizer_of(tables)
        for state, each in OPTIMIZERS[optimizer].states.items():
            if each == "row":
                memory[state] = self._windows(torch.float32, rows, state)
            else:  # as large as the weights; on CPU the offsets must be the weights', too
                memory[state] = self._buffer(state, torch.float32, weights.numel()), starts
        return make_tbe(shapes, memory, TableOptimizerConfig(name=optimizer, lr=1e-6), dtype, pooling, self.device)

    def _optimizer_of(self, tables: Sequence[TableConfig]) -> TableOptimizer:
        """Returns the optimizer of tables of one format."""
        return self.optimizer if tables[0].optimizer is None else tables[0].optimizer.name

    def _windows(self, dtype: torch.dtype, sizes: Sequence[int], kind: str) -> tuple[Tensor, list[int]]:
        """Returns a resident buffer that holds the largest window, and the start of each window in it."""
        generator = np.random.default_rng(len(sizes))
        buffer = self._buffer(kind, dtype, max(sizes))
        return buffer, [_ALIGN * int(generator.integers(0, (buffer.numel() - size) // _ALIGN + 1)) for size in sizes]

    def _buffer(self, kind: str, dtype: torch.dtype, elements: int) -> Tensor:
        """Returns the resident buffer of a kind, grown to `elements`, with finite values."""
        have = self._buffers.pop((kind, dtype), torch.empty(0, dtype=dtype, device=self.device))
        if have.numel() < elements:
            size = max(elements, min(2 * have.numel(), self._buffer_bytes // dtype.itemsize))
            del have
            host = self.device.type == "cpu"
            have = in_huge_pages(size, dtype) if host else torch.empty(size, dtype=dtype, device=self.device)
            have.fill_(1e-3)
        self._buffers[kind, dtype] = have
        return have


def now(device: torch.device) -> float:
    """Returns seconds, after the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def in_fewer_rows(draws: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Maps the ids of several batches one to one into fewer rows, so that the same ids repeat. If there are more
    distinct ids than rows, some share a row."""
    distinct, positions = np.unique(torch.cat(list(draws)).numpy(), return_inverse=True)
    place = np.random.default_rng(len(distinct)).permutation(rows)[: len(distinct)]
    scattered = torch.from_numpy(place[positions % len(place)].astype(np.int32))
    return list(scattered.split([len(draw) for draw in draws]))


def median_time(times: Sequence[ShardTime]) -> ShardTime:
    """Combines one shard's measurements: the median of each figure."""
    return ShardTime(
        float(np.median([one.fwd_compute_ms for one in times])),
        float(np.median([one.bwd_compute_ms for one in times])),
        float(np.median([one.noise for one in times])),
        sum(one.repeats for one in times),
    )


def spread_of_times(times: Sequence[ShardTime]) -> float:
    """Returns how far measurements of one shard differ: interquartile range / median of forward + backward."""
    return relative_spread([one.fwd_compute_ms + one.bwd_compute_ms for one in times])


def relative_spread(values: Sequence[float]) -> float:
    """Returns interquartile range / median."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return float((high - low) / median) if median > 0 else 0.0
