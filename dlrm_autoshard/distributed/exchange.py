"""What travels between ranks in a step: ids to the tables' owners, pooled vectors back, gradients to the owners.

Ids go in two all-to-alls (lengths, then values, whose sizes the lengths tell). Vectors need no packing: the owner's
lookup computes the whole global batch, so the rows for one rank are contiguous already. On arrival one `index_select`
puts them in the output order, which no plan changes: that is why placement cannot change a single bit of the model.

Axes: T tables, B samples a rank, W ranks, N ids, D embedding dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.shared_memory import SharedMemory
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig


@dataclass(frozen=True)
class LocalIds:
    """Ids of the tables this rank owns, for the whole global batch, as fbgemm takes them: table-major bags."""

    values_N: Tensor
    offsets: Tensor  # [T_local * W * B + 1]
    batch_size: int  # B, of one rank


class Pending:
    """A collective on its way. `wait()` gives what arrived, as often as it is asked."""

    def __init__(self, finish: Callable[[], object] | None, result: Tensor, *kept_alive: Tensor) -> None:
        self._finish, self._result, self._kept_alive = finish, result, kept_alive

    def wait(self) -> Tensor:
        if self._finish is not None:
            self._finish()
            self._finish, self._kept_alive = None, ()
        return self._result


class IdDistribution:
    """One batch's ids on their way to the owners, in steps that the caller interleaves with computing:
    `send_lengths` (at once), `send_values`, `finish`."""

    def __init__(self, exchange: Exchange, batch: Batch) -> None:
        self._exchange, self._batch_size = exchange, batch.padded_size
        e = exchange
        if e.send_order is None:
            self._lengths, self._values = batch.lengths_TB, batch.values_N
        else:
            self._lengths, self._values, _ = torch.ops.fbgemm.permute_2D_sparse_data(
                e.send_order, batch.lengths_TB, batch.values_N, None, batch.values_N.numel()
            )
        if e.world_size > 1:
            per_table = self._lengths.sum(1).tolist()
            self._value_splits = [sum(per_table[a:b]) for a, b in e.table_ranges]
            received = self._lengths.new_empty(e.world_size, e.num_local * self._batch_size)
            self._lengths_pending = e.all_to_all(
                "lengths",
                received.view(-1),
                self._lengths.reshape(-1),
                [e.num_local * self._batch_size] * e.world_size,
                [(b - a) * self._batch_size for a, b in e.table_ranges],
            )
            self._values_pending: Pending | None = None

    def send_values(self) -> None:
        e = self._exchange
        if e.world_size == 1:
            return
        self._received_lengths = self._lengths_pending.wait().view(e.world_size, -1)
        splits = self._received_lengths.sum(1).tolist()
        received = self._values.new_empty(sum(splits))
        self._values_pending = e.all_to_all("values", received, self._values, splits, self._value_splits)

    def finish(self) -> LocalIds:
        e = self._exchange
        if e.world_size == 1:
            offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(self._lengths.reshape(-1).to(self._values.dtype))
            return LocalIds(self._values, offsets, self._batch_size)
        if self._values_pending is None:
            self.send_values()
        assert self._values_pending is not None
        values = self._values_pending.wait()
        lengths = self._received_lengths.view(e.world_size * e.num_local, self._batch_size)
        if e.num_local and e.world_size > 1:  # from rank-major to table-major
            lengths, values, _ = torch.ops.fbgemm.permute_2D_sparse_data(
                e.receive_order, lengths, values, None, values.numel()
            )
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.reshape(-1).to(values.dtype))
        return LocalIds(values, offsets, self._batch_size)


@dataclass
class Exchange:
    """Who sends what to whom under one plan. Made anew when the plan changes; holds no rows.

    batch_tables: tables in the batch's order. output_order: indices into them, in the order of the pooled output.
    """

    batch_tables: Sequence[TableConfig]
    output_order: Sequence[int]
    plan: ShardingPlan
    rank: int
    group: dist.ProcessGroup
    id_group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype = torch.float32
    link: SharedMemory | None = None
    _layouts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world_size = self.plan.world_size
        ordered = [self.batch_tables[i] for i in self.output_order]
        owned = [[i for i in self.output_order if self.plan.rank_of[self.batch_tables[i].name] == r]
                 for r in range(self.world_size)]  # fmt: skip
        self.num_local = len(owned[self.rank])
        ends = [0]
        for tables in owned:
            ends.append(ends[-1] + len(tables))
        self.table_ranges = list(itertools.pairwise(ends))
        order = [i for tables in owned for i in tables]
        self.send_order: Tensor | None = torch.tensor(order, dtype=torch.int32, device=self.device)
        if order == list(range(len(order))):
            self.send_order = None
        self.receive_order = torch.tensor(
            [rank * self.num_local + t for t in range(self.num_local) for rank in range(self.world_size)],
            dtype=torch.int32,
            device=self.device,
        )
        self.dims = [sum(self.batch_tables[i].embedding_dim for i in tables) for tables in owned]
        self.total_dim = sum(self.dims)
        # The output order, in chunks as wide as every table's dim allows: where each chunk lies among what arrives.
        self._chunk = math.gcd(*(table.embedding_dim for table in ordered))
        base, stride, column = [], [], []
        position = dict.fromkeys(range(self.world_size), 0)
        starts = [sum(self.dims[:rank]) for rank in range(self.world_size)]
        for table in ordered:
            owner = self.plan.rank_of[table.name]
            for chunk in range(table.embedding_dim // self._chunk):
                base.append(starts[owner] // self._chunk)
                stride.append(self.dims[owner] // self._chunk)
                column.append(position[owner] + chunk)
            position[owner] += table.embedding_dim // self._chunk
        self._where = torch.tensor([base, stride, column], device=self.device)

    @property
    def local_dim(self) -> int:
        return self.dims[self.rank]

    def distribute(self, batch: Batch) -> IdDistribution:
        return IdDistribution(self, batch)

    def send_pooled(self, local: Tensor) -> Pending:
        """local: [W * B, D_local] of this rank's tables. Arrives as rank-major blocks; see `in_output_order`."""
        if self.world_size == 1:
            return Pending(None, local)
        batch_size = local.shape[0] // self.world_size
        sent = local.to(self.dtype).view(-1)
        received = sent.new_empty(batch_size * self.total_dim)
        return self.all_to_all(
            "pooled",
            received,
            sent,
            [batch_size * dim for dim in self.dims],
            [batch_size * self.local_dim] * self.world_size,
        )

    def in_output_order(self, arrived: Tensor) -> Tensor:
        """[B, D] float32 in the output order, from what `send_pooled` brought."""
        if self.world_size == 1:
            return arrived
        batch_size = arrived.numel() // self.total_dim
        index, _ = self._layout(batch_size)
        return arrived.view(-1, self._chunk).index_select(0, index).view(batch_size, self.total_dim).float()

    def send_gradients(self, gradient_BD: Tensor) -> Pending:
        """Gradients of the pooled output to the owners; arrives as [W * B, D_local], times `gradient_scale(W * B)`."""
        if self.world_size == 1:
            return Pending(None, gradient_BD)
        batch_size = gradient_BD.shape[0]
        scale = self.gradient_scale(batch_size * self.world_size)
        if scale != 1.0:
            gradient_BD = gradient_BD * scale
        _, inverse = self._layout(batch_size)
        sent = gradient_BD.to(self.dtype).view(-1, self._chunk).index_select(0, inverse).view(-1)
        received = sent.new_empty(self.world_size * batch_size * self.local_dim)
        return self.all_to_all(
            "gradients",
            received,
            sent,
            [batch_size * self.local_dim] * self.world_size,
            [batch_size * dim for dim in self.dims],
        )

    def gradient_scale(self, global_batch: int) -> float:
        """Gradients are shares of a mean over the global batch, so in fp16 they would fall below its smallest steps:
        they travel times a power of two near the batch, which is exact. Other formats have exponents to spare."""
        if self.dtype != torch.float16 or self.world_size == 1:
            return 1.0
        return float(2 ** int(math.log2(global_batch)))

    def all_to_all(
        self, channel: str, received: Tensor, sent: Tensor, receive_splits: list[int], send_splits: list[int]
    ) -> Pending:
        """Through shared memory where all ranks are on one host, else through the process group."""
        if self.link is not None:
            return Pending(self.link.all_to_all(channel, received, sent, receive_splits, send_splits), received)
        group = self.id_group if channel in ("lengths", "values") else self.group
        work = dist.all_to_all_single(received, sent, receive_splits, send_splits, group=group, async_op=True)
        return Pending(work.wait, received, sent)

    def _layout(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Chunk index of the output order, and its inverse; two batch sizes occur in a run, so both are kept."""
        if batch_size not in self._layouts:
            base, stride, column = self._where
            rows = torch.arange(batch_size, device=self.device)[:, None]
            index = (base * batch_size + rows * stride + column).reshape(-1)
            inverse = torch.empty_like(index)
            inverse[index] = torch.arange(len(index), device=self.device)
            if len(self._layouts) > 4:
                self._layouts.clear()
            self._layouts[batch_size] = (index, inverse)
        return self._layouts[batch_size]
