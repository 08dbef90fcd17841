"""Row-wise Adagrad on CPU by fbgemm's plain loop, for CPUs on which it is faster than fbgemm's generated code.

tbe = RowwiseAdagradTbe(...) if plain_loop_is_faster() else Tbe(...)       # arguments, lookup and state are the same

The generated code of fbgemm 1.8 changes between SSE and AVX instructions six times per row, at 70 ns each on an Intel
CPU of 2023: 26 ms for 43,000 rows, where the plain loop takes 8. On an AMD CPU (family 25) the changes are free.
"""

from __future__ import annotations

import time
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen as Tbe,
)
from torch import Tensor
from torch.autograd.function import once_differentiable


class RowwiseAdagradTbe(Tbe):
    """A Tbe whose updates use fbgemm's plain loop.

    fbgemm uses that loop for a table that several features look up, so updates add to each table a feature without
    columns or ids. The loop adds a row's gradients in the order of samples, like the generated code, but the squares of
    a row in another order, so weights differ in their last bits.
    """

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Returns pooled vectors [B, D]; if gradients are on, their gradient function is the update."""
        if not torch.is_grad_enabled():
            return self.look_up(indices, offsets, per_sample_weights)
        pooled: Tensor = _LookUp.apply(self.weights_host, self, indices, offsets, per_sample_weights)
        return pooled

    def look_up(self, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> Tensor:
        pooled: Tensor = super().forward(values_N, offsets, weights_N)
        return pooled

    def update(self, gradient_BD: Tensor, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> None:
        samples, offsets = len(gradient_BD), offsets.to(values_N.dtype)
        feature_of, added, last = self._with_empty_features
        starts = offsets[:-1].view(-1, samples).index_select(0, feature_of)
        starts[added] = offsets[samples::samples, None][last]
        torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu(
            grad_output=gradient_BD,
            host_weights=self.weights_host,
            indices=values_N,
            offsets=torch.cat([starts.flatten(), offsets[-1:]]),
            pooling_mode=self.pooling_mode.value,
            indice_weights=torch.empty(0) if weights_N is None else weights_N,
            momentum1_host=self.momentum1_host,
            learning_rate_tensor=self.learning_rate_tensor,
            **self._constant_arguments,
        )

    @cached_property
    def _with_empty_features(self) -> tuple[Tensor, slice | list[int], slice | list[int]]:
        """Features with an empty one added after the last of each table: the original feature of each; the indices of
        the added ones; and the features that are the last of their table."""
        table_of = self.feature_table_map
        last = [f for f, table in enumerate(table_of) if f + 1 == len(table_of) or table_of[f + 1] != table]
        feature_of = sorted([*range(len(table_of)), *last])
        added = [feature + number + 1 for number, feature in enumerate(last)]
        if len(last) == len(table_of):  # slices are faster
            return torch.tensor(feature_of), slice(1, None, 2), slice(None)
        return torch.tensor(feature_of), added, last

    @cached_property
    def _constant_arguments(self) -> dict[str, Any]:
        """Arguments of the update that are equal in every step."""
        feature_of, added, _ = self._with_empty_features
        placements = torch.zeros(len(feature_of), dtype=torch.int32)
        starts = self.D_offsets[feature_of]
        starts[added] = self.D_offsets[feature_of + 1][added]
        return {
            "weights_placements": placements,
            "weights_offsets": self.weights_offsets[feature_of],
            "D_offsets": torch.cat([starts, self.D_offsets[-1:]]),
            "max_D": self.max_D,
            "hash_size_cumsum": torch.cat([self.hash_size_cumsum[feature_of], self.hash_size_cumsum[-1:]]),
            "total_hash_size_bits": self.total_hash_size_bits,
            "stochastic_rounding": False,
            "momentum1_placements": placements,
            "momentum1_offsets": self.momentum1_offsets[feature_of],
            "eps": self.optimizer_args.eps,
            "weight_decay": self.optimizer_args.weight_decay,
            "weight_decay_mode": self.optimizer_args.weight_decay_mode,
        }


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, tbe: RowwiseAdagradTbe, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None
    ) -> Tensor:
        """weights: of all tables; unused, but makes autograd call `backward`."""
        ctx.tbe, ctx.ids = tbe, (values_N, offsets, weights_N)
        return tbe.look_up(values_N, offsets, weights_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BD: Tensor) -> tuple[None, ...]:
        ctx.tbe.update(gradient_BD, *ctx.ids)
        return None, None, None, None, None


_FASTER = 0.7
"""The plain loop's time must be below this share of the generated code's, so that noise does not change the choice."""


def faster_on_all(group: dist.ProcessGroup) -> bool:
    """Returns whether the plain loop is faster on every rank of a gloo group. Ranks must choose alike, because weights
    differ in their last bits, and a move would then change training."""
    if dist.get_world_size(group) == 1:
        return plain_loop_is_faster()
    faster = torch.tensor(float(plain_loop_is_faster()))
    dist.all_reduce(faster, dist.ReduceOp.MIN, group=group)
    return bool(faster)


@cache
def plain_loop_is_faster() -> bool:
    """Measures both, once per process, in about 20 ms. False with several threads: the plain loop uses one."""
    if torch.get_num_threads() > 1:
        return False
    rows, dim = 4096, 32
    tbe = RowwiseAdagradTbe(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    ids, offsets, gradient = torch.arange(rows), torch.arange(rows + 1), torch.full((rows, dim), 1e-3)

    def seconds(pooled: Tensor) -> float:
        started = time.perf_counter()
        pooled.backward(gradient)
        return time.perf_counter() - started

    try:  # the first round generates the code; the quickest of the others counts
        rounds = [(seconds(Tbe.forward(tbe, ids, offsets)), seconds(tbe(ids, offsets))) for _ in range(6)]
    except (AttributeError, RuntimeError):  # another fbgemm, whose update has another signature
        return False
    generated, plain = map(min, zip(*rounds, strict=True))
    return plain < _FASTER * generated
