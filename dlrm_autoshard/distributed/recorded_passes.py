"""Records the dense part's passes as CUDA graphs, and launches each as a whole from then on.

Launching small layers one by one keeps the host busier than the device: on an H200 with a Xeon 3.2 ms of a step of 4.5,
for 1.8 ms of computation. Launching a recording takes 0.04 ms. It reads and writes fixed memory, so batches are copied
there; batches of other sizes run unrecorded.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.device import CudaGraphs, Record
from dlrm_autoshard.distributed.in_parts import PassesInParts
from dlrm_autoshard.distributed.lookup.lookups import EmbeddingBags
from dlrm_autoshard.distributed.step import DensePasses
from dlrm_autoshard.model.dlrm import DenseArch
from dlrm_autoshard.model.jagged import Sequences

LOG = logging.getLogger("dlrm_autoshard")
WARM_UP = 3
"""Steps before recording, in which libraries load kernels and allocate memory."""
AGREE = 0.01
"""Fraction of a tensor's norm by which a replay may differ from the launched passes. Libraries may sum in another
order, in bf16's 8 bits; reading a stale value makes a difference as large as between batches."""


def passes_over(
    model: DenseArch, bags: EmbeddingBags, *, autocast: bool, graphs: bool, accumulate: int = 1
) -> DensePasses:
    """Returns a training step's passes. autocast: bf16 matrix products. graphs: use CUDA graphs on a GPU. accumulate:
    parts of a batch to run one by one."""
    if accumulate > 1:
        return PassesInParts(model, accumulate, autocast=autocast)
    if not graphs or bags.device.type != "cuda":
        return DensePasses(model, autocast=autocast)
    width = sum(table.embedding_dim for table in bags.sharded.output_tables)
    return RecordedPasses(model, width, autocast=autocast, record=CudaGraphs(bags.device))


class FourPasses:
    """The dense part's forward and backward passes as four calls. Gradients are added to the parameters' own. Each pass
    frees what the earlier ones kept for it."""

    def __init__(self, passes: DensePasses) -> None:
        self._passes = passes

    def bottom(self, batch: Batch) -> None:
        self._bottom, self.batch = self._passes.bottom(batch), batch

    def top(self, pooled: Tensor) -> Tensor:
        self._leaves = self._bottom.detach().requires_grad_(), pooled.detach().requires_grad_()
        self._loss = self._passes.top(*self._leaves, self.batch, {})
        return self._loss.detach()

    def backward_top(self) -> Tensor:
        """Returns the gradient of `pooled`."""
        self._loss.backward()
        bottom, pooled = self._leaves
        del self._loss, self._leaves  # they hold the vectors and their gradient
        self._bottom_gradient, gradient = bottom.grad, pooled.grad
        assert gradient is not None
        return gradient

    def backward_bottom(self) -> None:
        if self._bottom.requires_grad:  # false without parameters
            self._bottom.backward(self._bottom_gradient)
        del self._bottom, self._bottom_gradient, self.batch

    def give_up(self) -> None:
        """Frees a batch whose backward passes will not run."""
        del self._bottom, self.batch, self._loss, self._leaves


class RecordedPasses(DensePasses):
    """`DensePasses` with CUDA graphs. Once recorded, passes are launched and also replayed on another batch, and from
    then on replayed only if loss and gradients agree. Otherwise they stay launched, and the log says so: the model may
    draw random numbers or read values on the host."""

    def __init__(self, model: DenseArch, width: int, *, autocast: bool, record: Record) -> None:
        """width: of the pooled vectors, without the model's margin."""
        super().__init__(model, autocast=autocast)
        self._launched = FourPasses(DensePasses(model, autocast=autocast))
        self._record, self._width = record, sum(model.margin) + width
        self._launches, self._agrees = 0, False
        self._recording: Recording | None = None
        self._replayed: Recording | None = None  # the recording used for this batch
        self._compared: Recording | None = None
        self._gradients_made: Callable[[], None] | None = None

    # -- what a step calls: autograd's nodes around the passes ---------------------------------------------------------

    def bottom(self, batch: Batch) -> Tensor:
        """Returns a token that stands for the bottom's output."""
        token: Tensor = _Bottom.apply(batch.dense_BF.new_zeros((), requires_grad=True), self, batch)
        return token

    def top(self, bottom: Tensor, pooled: Tensor, batch: Batch, sequences: Sequences) -> Tensor:
        """pooled: lies in `place` if that is set. sequences: always empty on GPUs."""
        loss: Tensor = _Top.apply(bottom, pooled, self)
        return loss

    def backward(self, loss: Tensor, dense: DataParallelDense) -> None:
        self._gradients_made = dense.gradients_made
        dense.backward(loss, counted=False)  # autograd does not see a replay's gradients

    def give_up(self) -> None:
        """Frees a batch whose backward passes will not run."""
        if self._replayed is None:
            self._launched.give_up()
        if self._compared is not None:
            del self._taken, self._seen

    # -- launched, or replayed -----------------------------------------------------------------------------------------

    def forward_bottom(self, batch: Batch) -> None:
        recording = self._recording if self._recording and self._recording.like == _layout(batch) else None
        self._replayed, self._compared = (recording, None) if self._agrees else (None, recording)
        if self._replayed is not None:
            self.place = self._replayed.pooled
            self._replayed.take(batch)
            self._replayed.bottom()
            return
        self.place = None
        if self._launches == WARM_UP and batch.size == batch.padded_size:
            self._make_recording(batch)
        if self._launches < WARM_UP or batch.size == batch.padded_size:
            self._launches += 1
        self._launched.bottom(batch)

    def forward_top(self, pooled: Tensor) -> Tensor:
        if self._replayed is not None:
            self._replayed.top()
            return self._replayed.loss
        loss = self._launched.top(pooled)
        if self._compared is not None:
            self._taken, self._seen = (self._launched.batch, pooled), [loss]
        return loss

    def backward_top(self) -> Tensor:
        if self._replayed is not None:
            self._replayed.backward_top()
            return self._replayed.gradient
        gradient = self._launched.backward_top()
        if self._compared is not None:
            self._seen.append(gradient)
        return gradient

    def backward_bottom(self) -> None:
        if self._replayed is not None:
            self._replayed.backward_bottom()
        else:
            self._launched.backward_bottom()
            if self._compared is not None:
                self._compare(self._compared)
                del self._taken, self._seen
        if self._gradients_made is not None:
            self._gradients_made()

    def _make_recording(self, batch: Batch) -> None:
        passes = FourPasses(DensePasses(self.model, autocast=self._bf16))
        try:
            self._recording = Recording(passes, batch, self._width, self._record)
        except RuntimeError as error:  # torch's, for operations that cannot be recorded
            LOG.warning("the dense part is not recorded as CUDA graphs: %s", str(error).partition("\n")[0])

    def _compare(self, recording: Recording) -> None:
        """Compares a replay with the launched passes; leaves gradients and buffers as launching made them."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        changed = [*gradients, *self.model.buffers()]
        kept = [tensor.clone() for tensor in changed]
        for gradient in gradients:
            gradient.zero_()
        batch, pooled = self._taken
        recording.take(batch)
        recording.pooled.copy_(pooled)
        for replay in (recording.bottom, recording.top, recording.backward_top, recording.backward_bottom):
            replay()
        launched = [*self._seen, *kept[: len(gradients)]]
        apart = _apart([recording.loss, recording.gradient, *gradients], launched)
        for tensor, value in zip(changed, kept, strict=True):
            tensor.copy_(value)
        self._agrees = apart <= AGREE
        if apart > AGREE:  # false for NaN
            self._recording = None
            LOG.warning(
                "the dense part is not replayed as CUDA graphs: on a batch other than the recorded one, loss or "
                "gradients differ by %.2g of their norm. Does the model draw numbers, or read values on the host?",
                apart,
            )


class _Bottom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, passes: RecordedPasses, batch: Batch) -> Tensor:
        ctx.passes = passes
        with torch.enable_grad():
            passes.forward_bottom(batch)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[None, None, None]:
        with torch.enable_grad():  # recomputation inside needs autograd
            ctx.passes.backward_bottom()
        return None, None, None


class _Top(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bottom: Tensor, pooled: Tensor, passes: RecordedPasses) -> Tensor:
        ctx.passes = passes
        with torch.enable_grad():
            return passes.forward_top(pooled.detach()).detach()

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, Tensor, None]:
        with torch.enable_grad():
            return torch.zeros_like(of_loss), ctx.passes.backward_top(), None


class Recording:
    """Recorded passes for batches of one layout; recording computes nothing. loss, gradient: written by `top` and
    `backward_top`. pooled: read by `top`."""

    def __init__(self, passes: FourPasses, batch: Batch, width: int, record: Record) -> None:
        self.like = _layout(batch)
        own: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in _read(batch).items()}
        self._batch = replace(batch, values_N=batch.values_N[:0], weights_N=None, **own)  # the dense part reads no ids
        self.pooled = batch.dense_BF.new_empty(batch.padded_size, width)
        gc.collect()  # memory freed during a recording would become part of it
        self.loss: Tensor
        self.gradient: Tensor
        _, self.bottom = record(lambda: passes.bottom(self._batch))
        self.loss, self.top = record(lambda: passes.top(self.pooled))
        self.gradient, self.backward_top = record(passes.backward_top)
        _, self.backward_bottom = record(passes.backward_bottom)

    def take(self, batch: Batch) -> None:
        """Copies a batch to the memory that the next replays read."""
        for name, tensor in _read(self._batch).items():
            tensor.copy_(getattr(batch, name))


def _read(batch: Batch) -> dict[str, Tensor]:
    """Returns the tensors of a batch that the dense part reads."""
    read = {"dense_BF": batch.dense_BF, "labels_B": batch.labels_B, "loss_weights_B": batch.loss_weights_B}
    return {name: tensor for name, tensor in read.items() if tensor is not None}


def _layout(batch: Batch) -> tuple[object, ...]:
    """Returns the layout that all batches of a recording share."""
    return batch.size, batch.global_size, *((name, t.shape, t.dtype) for name, t in _read(batch).items())


def _apart(these: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Returns the largest difference relative to the others' norms; NaN if these are not finite."""
    norm = torch.linalg.vector_norm
    norms = torch.stack([torch.stack([norm(a - b), norm(b)]) for a, b in zip(these, others, strict=True)])
    apart_N, norm_N = norms.T
    if not norm_N.isfinite().all():
        return float("nan")
    return float((apart_N / norm_N.clamp(min=1e-6 * float(norm_N.max()))).nan_to_num(torch.inf).max())
