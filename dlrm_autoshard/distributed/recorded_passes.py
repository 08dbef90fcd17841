"""The dense part's passes on a GPU, recorded once as CUDA graphs and launched whole from then on.

Launching small layers one by one takes the host longer than the device computes: on an H200 beside a Xeon 3.2 ms of a
step's 4.5, for 1.8 of computing. Recorded, launching takes 0.04. A recording reads and writes the same memory each
time, so batches are copied there; those of another size take the passes one by one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.dense_passes import DensePasses
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.model.dlrm import DenseArch

WARM_UP = 3
"""Steps before passes are recorded: libraries load their kernels and take their memory at the first."""

Replay = Callable[[], object]
Record = Callable[[Callable[[], Any]], tuple[Any, Replay]]
"""Of a function: what it returned, and what writes the same tensors anew as if it were called again."""


class RecordedPasses(DensePasses):
    """model: of which nothing depends on values on the host, and nothing waits for the device."""

    def __init__(self, model: DenseArch, width: int, *, autocast: bool, record: Record) -> None:
        """width: of the pooled vectors, without the model's margin."""
        super().__init__(model, autocast=autocast)
        self._record, self._width = record, sum(model.margin) + width
        self._steps, self._replays = 0, False
        self._like: tuple[object, ...] | None = None

    def bottom(self, batch: Batch) -> None:
        self._steps += 1
        if self._like is None and self._steps > WARM_UP and batch.size == batch.padded_size:
            self._like = _layout(batch)
            self._record_all(batch)
        self._replays = _layout(batch) == self._like
        self.place = self._pooled if self._replays else None
        if not self._replays:
            super().bottom(batch)
            return
        for name, tensor in _read(self._static).items():
            tensor.copy_(getattr(batch, name))
        self._replay_bottom()

    def top(self, pooled: Tensor) -> Tensor:
        """pooled: lies in `place`, where that is not None."""
        if not self._replays:
            return super().top(pooled)
        self._replay_top()
        return self._recorded_loss

    def backward_top(self) -> Tensor:
        if not self._replays:
            return super().backward_top()
        self._replay_backward_top()
        return self._recorded_gradient

    def backward_bottom(self) -> None:
        if not self._replays:
            super().backward_bottom()
            return
        self._replay_backward_bottom()

    def give_up(self) -> None:
        if not self._replays:
            super().give_up()

    def _record_all(self, batch: Batch) -> None:
        """Nothing is computed by it. All four at once, whatever becomes of this batch's step."""
        own: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in _read(batch).items()}
        self._static = replace(batch, values_N=batch.values_N[:0], weights_N=None, **own)  # its ids nobody reads
        self._pooled = batch.dense_BF.new_empty(batch.padded_size, self._width)
        passes = DensePasses(self.model, autocast=self._bf16)
        gc.collect()  # memory that goes while there is a recording would be in it
        try:
            _, self._replay_bottom = self._record(lambda: passes.bottom(self._static))
            self._recorded_loss, self._replay_top = self._record(lambda: passes.top(self._pooled))
            self._recorded_gradient, self._replay_backward_top = self._record(passes.backward_top)
            _, self._replay_backward_bottom = self._record(passes.backward_bottom)
        except RuntimeError as error:
            raise UserError(
                "the dense part cannot be recorded as CUDA graphs: something in it waits for the GPU, or depends on "
                f"values that are not there. Set train.cuda_graphs: false. torch says: {error}"
            ) from error


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


def _read(batch: Batch) -> dict[str, Tensor]:
    """What the dense part reads of a batch."""
    read = {"dense_BF": batch.dense_BF, "labels_B": batch.labels_B, "loss_weights_B": batch.loss_weights_B}
    return {name: tensor for name, tensor in read.items() if tensor is not None}


def _layout(batch: Batch) -> tuple[object, ...]:
    """What is the same of all batches that one recording is good for."""
    return batch.size, batch.global_size, *((name, t.shape, t.dtype) for name, t in _read(batch).items())
