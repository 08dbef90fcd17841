"""Hooks on a sharded EmbeddingBagCollection that time its stages and report the ids that reach its tables.

StageHooks(collection, clock, arrived)          # arrived(features): each training lookup's KeyedJaggedTensor

Sampled steps wait for the output exchange where it starts, so that it can be timed; other steps run as without hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.torchrec.shards import kernels, owned_lookups
from dlrm_autoshard.torchrec.tables import is_data_parallel

Arrived = Callable[[Any, Any], None]
"""(features, the lookup's GroupedEmbeddingConfigs)"""


class StageHooks:
    """Hooks on one collection; made again whenever its lookups change. `remove` removes them."""

    def __init__(self, collection: Any, clock: StageClock, arrived: Arrived) -> None:
        self._collection, self._clock, self._arrived = collection, clock, arrived
        self._handles = [collection.register_forward_pre_hook(self._before_ids)]
        for lookup in filter(is_data_parallel, collection._lookups):
            self._handles.append(lookup.register_forward_pre_hook(self._before_copies))
        for lookup, output in owned_lookups(collection):
            self._handles += [
                lookup.register_forward_pre_hook(self._before_lookup),
                lookup.register_forward_hook(self._after_lookup),
                output.register_forward_pre_hook(self._before_exchange),
                output.register_forward_hook(self._after_exchange),
            ]
        for kernel, _ in kernels(collection):
            self._handles.append(kernel.register_forward_hook(self._after_kernel))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def _timed(self) -> bool:
        return self._clock.sampled and self._training

    @property
    def _training(self) -> bool:
        return self._collection.training and torch.is_grad_enabled()

    def _begin_exchange(self, stage: str) -> None:
        self._clock.barrier(stage)
        self._clock.begin(stage)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _before_ids(self, collection: Any, inputs: Any) -> None:
        if self._timed:
            self._begin_exchange("input_dist")

    def _before_copies(self, lookup: Any, inputs: Any) -> None:
        """Counts data-parallel lookups as dense: each rank looks up its own samples."""
        if self._timed:
            self._clock.end()
            self._clock.begin("dense_fwd")

    def _before_lookup(self, lookup: Any, inputs: Any) -> None:
        if self._timed:
            self._clock.end()
        if self._training:
            self._arrived(inputs[0], lookup.grouped_configs)
        if self._timed:
            self._clock.begin("fwd_compute")

    def _after_lookup(self, lookup: Any, inputs: Any, pooled: Tensor) -> None:
        if self._timed:
            self._clock.end()

    def _before_exchange(self, output: Any, inputs: Any) -> None:
        if self._timed:
            self._begin_exchange("fwd_comms")
            _when_gradient(inputs[0], self._clock.end, once=True)  # the vectors' gradients have arrived here

    def _after_exchange(self, output: Any, inputs: Any, pending: Any) -> Any:
        if not self._timed:
            return None
        from torchrec.distributed.types import NoWait

        arrived = pending.wait()
        self._clock.begin("dense_fwd")
        _when_gradient(arrived, lambda: self._begin_exchange("bwd_comms"))
        return NoWait(arrived)

    def _after_kernel(self, kernel: Any, inputs: Any, pooled: Tensor) -> None:
        """Times the kernel's gradient function, which is the fused backward and update."""
        if self._timed and pooled.grad_fn is not None:
            pooled.grad_fn.register_prehook(lambda _: self._clock.begin("bwd_compute"))
            pooled.grad_fn.register_hook(lambda _, __: self._clock.end())


def _when_gradient(tensor: Tensor, call: Callable[[], None], *, once: bool = False) -> None:
    """Calls `call` when the tensor's gradient arrives. once: for a tensor that outlives the step, as the one that
    stands for no tables does."""
    if not tensor.requires_grad:
        return

    def hook(gradient: Tensor) -> None:
        if once:
            handle.remove()
        call()

    handle = tensor.register_hook(hook)
