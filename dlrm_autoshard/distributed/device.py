"""Differences between devices: how moments are timed, streams beside the computing one, values read late, graphs.

timer = timer_of(device); mark = timer.mark()
on_device = streams.copy(host_tensor)               # queued; the host goes on
with streams.travel(): ...collectives...            # queued behind the copies
streams.join(on_device)                             # the computing stream waits for all that
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Replay = Callable[[], object]
Record = Callable[[Callable[[], Any]], tuple[Any, Replay]]
"""Records a function: returns its result, and what writes the same tensors anew as if it were called again."""


class Timer:
    """Marks moments without waiting for any work: of the host."""

    def mark(self) -> Any:
        return time.perf_counter()

    def finish(self, mark: Any) -> None:
        """Waits until the mark has been passed."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks that have been passed."""
        return float(end - start)


class DeviceTimer(Timer):
    """CUDA events on the stream that computes: the device notes the time when it gets there; the host goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # whatever device is the thread's current one
        return event

    def finish(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return 1e-3 * start.elapsed_time(end)


def timer_of(device: torch.device) -> Timer:
    """Returns the timer of what is computed on a device."""
    return DeviceTimer(device) if device.type == "cuda" else Timer()


class SideStreams:
    """Copies from the host, and travelling ids, on streams of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies, self._travels = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy(self, host: Tensor) -> Tensor:
        """From pinned memory, so that nobody waits; a tensor that is on the device already is given back."""
        computing = torch.cuda.current_stream(self._device)
        if host.device.type != "cpu":
            self._travels.wait_stream(computing)  # which may be computing it still
            return host
        with torch.cuda.stream(self._copies):
            copied = host.pin_memory().to(self._device, non_blocking=True)
        for reader in (self._travels, computing):  # or the next copy takes its memory while one of them still reads
            copied.record_stream(reader)
        return copied

    @contextlib.contextmanager
    def travel(self) -> Iterator[None]:
        self._travels.wait_stream(self._copies)
        with torch.cuda.stream(self._travels):
            yield

    def join(self, *made_beside: Tensor) -> None:
        """made_beside: that the computing stream is about to use."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._copies)
        current.wait_stream(self._travels)
        for tensor in made_beside:
            tensor.record_stream(current)


class LateFlag:
    """A number that is read step by step: at once on CPU; on GPUs as it was two steps ago, which waits for nothing."""

    def __init__(self) -> None:
        self._on_the_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def read_late(self, number: Tensor) -> bool | None:
        """number: one element, as it is now. None where there is nothing to read yet."""
        if number.device.type == "cpu":
            return bool(number)
        self._on_the_way.append((torch.empty(1, pin_memory=True), torch.cuda.Event()))
        self._on_the_way[-1][0].copy_(number, non_blocking=True)
        self._on_the_way[-1][1].record()
        if len(self._on_the_way) <= 2:
            return None
        value, arrived = self._on_the_way.popleft()
        arrived.synchronize()
        return bool(value)


class CudaGraphs:
    """Records one function after another; they are replayed in that order, and share memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Replay]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")  # others pin batches meanwhile
            try:
                result = function()
            finally:
                graph.capture_end()
        return result, graph.replay
