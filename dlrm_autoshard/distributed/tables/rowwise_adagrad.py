"""Row-wise Adagrad on CPU by fbgemm's plain loop, where that is faster than the code that fbgemm generates for it.

tbe = RowwiseAdagradTbe(...) if plain_loop_is_faster() else Tbe(...)       # arguments, lookup and state are the same

The generated code of fbgemm 1.8 changes between SSE and AVX instructions six times a row, for which an Intel CPU of
2023 takes 70 ns each: 26 ms for 43,000 rows, the plain loop 8. An AMD CPU (family 25) takes nothing for it.
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
    """fbgemm takes its plain loop for a table that several features look up. So the update is told of one more feature
    of each table, which has no columns and no ids. That loop adds a row's gradients in the order of samples, as the
    generated code does; a row's squares it adds one after the other, so weights differ in their last bits.
    """

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pooled vectors [B, D], with the update as their gradient function where gradients are on."""
        if not torch.is_grad_enabled():
            return self.look_up(indices, offsets, per_sample_weights)
        pooled: Tensor = _LookUp.apply(self.weights_host, self, indices, offsets, per_sample_weights)
        return pooled

    def look_up(self, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> Tensor:
        pooled: Tensor = super().forward(values_N, offsets, weights_N)
        return pooled

    def update(self, gradient_BD: Tensor, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> None:
        samples, offsets = len(gradient_BD), offsets.to(values_N.dtype)
        told_of, added, last = self._one_more
        starts = offsets[:-1].view(-1, samples).index_select(0, told_of)
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
            **self._told,
        )

    @cached_property
    def _one_more(self) -> tuple[Tensor, slice | list[int], slice | list[int]]:
        """[told of] the feature that each one is told as, the added one as its table's last; which are the added ones;
        and which features are the last of their table."""
        table_of = self.feature_table_map
        last = [f for f, table in enumerate(table_of) if f + 1 == len(table_of) or table_of[f + 1] != table]
        told_of = sorted([*range(len(table_of)), *last])
        added = [feature + number + 1 for number, feature in enumerate(last)]
        if len(last) == len(table_of):  # as slices, which take less time
            return torch.tensor(told_of), slice(1, None, 2), slice(None)
        return torch.tensor(told_of), added, last

    @cached_property
    def _told(self) -> dict[str, Any]:
        """Arguments of the update that are the same in every step."""
        told_of, added, _ = self._one_more
        placements = torch.zeros(len(told_of), dtype=torch.int32)
        starts = self.D_offsets[told_of]
        starts[added] = self.D_offsets[told_of + 1][added]
        return {
            "weights_placements": placements,
            "weights_offsets": self.weights_offsets[told_of],
            "D_offsets": torch.cat([starts, self.D_offsets[-1:]]),
            "max_D": self.max_D,
            "hash_size_cumsum": torch.cat([self.hash_size_cumsum[told_of], self.hash_size_cumsum[-1:]]),
            "total_hash_size_bits": self.total_hash_size_bits,
            "stochastic_rounding": False,
            "momentum1_placements": placements,
            "momentum1_offsets": self.momentum1_offsets[told_of],
            "eps": self.optimizer_args.eps,
            "weight_decay": self.optimizer_args.weight_decay,
            "weight_decay_mode": self.optimizer_args.weight_decay_mode,
        }


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, tbe: RowwiseAdagradTbe, values_N: Tensor, offsets: Tensor, weights_N: Tensor | None
    ) -> Tensor:
        """weights: of all tables; here for autograd to see that there is something to update."""
        ctx.tbe, ctx.ids = tbe, (values_N, offsets, weights_N)
        return tbe.look_up(values_N, offsets, weights_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BD: Tensor) -> tuple[None, ...]:
        ctx.tbe.update(gradient_BD, *ctx.ids)
        return None, None, None, None, None


_FASTER = 0.7
"""By so much the plain loop must be faster: CPUs on which it is not as clear would choose now so, now otherwise."""


def faster_on_all(group: dist.ProcessGroup) -> bool:
    """Returns whether the plain loop is faster on every rank of a gloo group. Ranks on other CPUs must not choose for
    themselves: weights differ in their last bits, so a table that moves would be trained otherwise."""
    if dist.get_world_size(group) == 1:
        return plain_loop_is_faster()
    faster = torch.tensor(float(plain_loop_is_faster()))
    dist.all_reduce(faster, dist.ReduceOp.MIN, group=group)
    return bool(faster)


@cache
def plain_loop_is_faster() -> bool:
    """Measured once a process, in some 20 ms. On one thread: the plain loop has no more."""
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

    try:  # the first round makes the code; of the others the quickest counts, which nothing has disturbed
        rounds = [(seconds(Tbe.forward(tbe, ids, offsets)), seconds(tbe(ids, offsets))) for _ in range(6)]
    except (AttributeError, RuntimeError):  # another fbgemm, whose update is called otherwise
        return False
    generated, plain = map(min, zip(*rounds, strict=True))
    return plain < _FASTER * generated
