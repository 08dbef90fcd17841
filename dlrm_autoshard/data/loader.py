"""Reads one rank's batches of one epoch ahead, in background threads.

with Loader(source, "train", epoch=0, batch_size=1024, rank=0, world_size=2) as loader:
    batch = next(iter(loader))
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Lock
from typing import Any

import torch

from dlrm_autoshard.data.batch import Batch, DataSource, Split
from dlrm_autoshard.data.checked_read import Stretch
from dlrm_autoshard.data.id_check import IdCheck, OnBadId
from dlrm_autoshard.data.value_check import check_finite, check_labels

_MOST_FOR_A_GPU = 4


def reader_threads(asked: int | None, device: torch.device, local_world_size: int) -> int:
    """Returns the number of reader threads per rank: as configured, else one on CPU, where it keeps ahead of the steps.

    A GPU's steps outrun one thread (distributed/GPU.md), so it gets up to four: the host's cores per rank, less one."""
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) // local_world_size
    return 1 if device.type == "cpu" else max(1, min(_MOST_FOR_A_GPU, cores - 1))


class Loader:
    """Iterates over a rank's batches, once or several times; a sample's place depends only on its position in the
    epoch.

    batch_size: samples per rank. first_sample: position in the epoch to resume from. prefetch_batches: batches to read
    ahead, at least one per thread; 0 reads in the caller's thread. threads: readers, bound to `cores` if given; their
    number changes only the speed. global_samples: the epoch's length, if not the source's. pin: read into pinned
    memory, for a GPU. labelled: False does not check labels. finite: False does not check dense features and id weights
    for NaN and infinity.

    Global batch i is samples [i * W * B, (i + 1) * W * B) of the epoch, and rank r takes its r-th slice. Of an uneven
    last batch of n samples each rank takes ceil(n / W), padded where fewer are left. For n = 5, W = 2: rank 0 has
    samples 0 1 2, rank 1 has 3 4 and an empty one.
    """

    def __init__(
        self,
        source: DataSource,
        split: Split,
        epoch: int,
        batch_size: int,
        rank: int,
        world_size: int,
        first_sample: int = 0,
        prefetch_batches: int = 2,
        threads: int = 1,
        global_samples: int | None = None,
        on_bad_id: OnBadId = "error",
        cores: Set[int] | None = None,
        pin: bool = False,
        labelled: bool = True,
        finite: bool = True,
        reading: AbstractContextManager[Any] | None = None,
    ) -> None:
        """reading: a lock to hold while reading from a source without `parallel_reads` that others read, too."""
        self._source, self._split, self._epoch = source, split, epoch
        self._rank, self._world_size = rank, world_size
        self._global_batch = batch_size * world_size
        self._last_sample = source.num_samples(split) if global_samples is None else global_samples
        self._starts = range(first_sample, self._last_sample, self._global_batch)
        self._ahead, self._threads = 0 if prefetch_batches == 0 else max(prefetch_batches, threads), threads
        self._cores, self._pin = cores, pin
        self._reading = nullcontext() if getattr(source, "parallel_reads", False) else reading or Lock()
        self._labelled, self._finite = labelled, finite
        self._check = IdCheck(source.tables, on_bad_id)
        # Weak, so that an iterator dropped half-way ends at once.
        self._running: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()

    def __len__(self) -> int:
        """Returns the number of global batches, including an uneven last one."""
        return len(self._starts)

    def __iter__(self) -> Iterator[Batch]:
        if self._ahead == 0:
            return map(self._read, self._starts)
        batches = self._read_ahead()
        self._running.add(batches)
        return batches

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        """Stops reading ahead and ends iterators left half-way; waits only for batches being read."""
        for batches in list(self._running):
            batches.close()

    def _read_ahead(self) -> Generator[Batch, None, None]:
        starts = iter(self._starts)
        pending: deque[Future[Batch]] = deque()
        bind = partial(os.sched_setaffinity, 0, self._cores) if self._cores else None  # binds the calling thread only
        reader = ThreadPoolExecutor(max_workers=self._threads, thread_name_prefix="data", initializer=bind)
        try:
            for start in starts:
                pending.append(reader.submit(self._read, start))
                if len(pending) > self._ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()  # re-raises the reader's exception
        finally:
            reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, start: int) -> Batch:
        num_samples = min(self._global_batch, self._last_sample - start)
        if self._source.reuse_batches is not None:
            start %= self._source.reuse_batches * self._global_batch
        share = -(-num_samples // self._world_size)
        first = start + min(num_samples, self._rank * share)
        last = start + min(num_samples, (self._rank + 1) * share)
        stretch = Stretch(self._source, self._split, self._epoch, first, last)
        with self._reading:
            batch = stretch.read()
        batch = stretch.checked(batch, self._check)
        if self._finite:
            check_finite(batch, stretch.sample, stretch.place)
        if self._labelled:
            check_labels(batch, stretch.sample, stretch.place)
        batch = batch.padded_to(share, num_samples)
        return batch.pinned() if self._pin else batch
