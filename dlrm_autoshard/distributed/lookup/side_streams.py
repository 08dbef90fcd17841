"""Streams of a GPU beside the one that computes: copies from the host, and ids on their way between ranks.

on_device = streams.copy(host_tensor)               # queued; the host goes on
with streams.travel(): ...collectives...            # queued behind the copies
streams.join(on_device)                             # the computing stream waits for all that
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


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
