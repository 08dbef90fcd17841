"""Differences between CPU and GPU: timing, side streams, values read late, CUDA graphs.

timer = timer_of(device); mark = timer.mark()
on_device = streams.copy(host_tensor)               # queued; the host continues
with streams.travel(): ...collectives...            # queued after the copies
streams.join(on_device)                             # the computing stream waits for both
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
"""Type of a recorder: runs a function and returns its result, and a replay that writes the same tensors again."""


class Timer:
    """Timestamps on the host."""

    def mark(self) -> Any:
        return time.perf_counter()

    def finish(self, mark: Any) -> None:
        """Waits until the device has passed the mark."""

    def seconds(self, start: Any, end: Any) -> float:
        """Returns seconds between two passed marks."""
        return float(end - start)


class DeviceTimer(Timer):
    """CUDA events on the computing stream: the device takes the time when it gets there, and the host continues."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # the thread's current device may be another
        return event

    def finish(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return 1e-3 * start.elapsed_time(end)


def timer_of(device: torch.device) -> Timer:
    """Returns the timer for work on a device."""
    return DeviceTimer(device) if device.type == "cuda" else Timer()


class SideStreams:
    """CUDA streams beside the computing one: for copies from the host, and for ids between ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies, self._travels = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy(self, host: Tensor) -> Tensor:
        """Copies from pinned memory without waiting; returns a tensor that is on the device already."""
        computing = torch.cuda.current_stream(self._device)
        if host.device.type != "cpu":
            self._travels.wait_stream(computing)  # it may still compute the tensor
            return host
        with torch.cuda.stream(self._copies):
            copied = host.pin_memory().to(self._device, non_blocking=True)
        for reader in (self._travels, computing):  # keeps the memory until both have read it
            copied.record_stream(reader)
        return copied

    @contextlib.contextmanager
    def travel(self) -> Iterator[None]:
        self._travels.wait_stream(self._copies)
        with torch.cuda.stream(self._travels):
            yield

    def join(self, *made_beside: Tensor) -> None:
        """Makes the computing stream wait for both side streams. made_beside: tensors that it will use."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._copies)
        current.wait_stream(self._travels)
        for tensor in made_beside:
            tensor.record_stream(current)


class LateFlag:
    """Reads a number each step without waiting: at once on CPU; on GPU its value of two steps ago."""

    def __init__(self) -> None:
        self._on_the_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def read_late(self, number: Tensor) -> bool | None:
        """number: one element, now. Returns None as long as there is no value to read."""
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
    """Records functions as CUDA graphs one after another; they share memory and are replayed in that order."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Replay]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(
                pool=self._memory, capture_error_mode="thread_local"
            )  # other threads pin batches meanwhile
            try:
                result = function()
            finally:
                graph.capture_end()
        return result, graph.replay
