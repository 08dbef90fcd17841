"""A step's exchanges between ranks: ids to the tables' owners, pooled vectors back, gradients to the owners.

Vectors need no packing: an owner's lookup computes the whole global batch, so the rows for one rank are contiguous. On
arrival one `index_select` puts them in the output order, which is independent of the plan; that is why placement cannot
change a bit of the model. Row shards' partial sums are added in the order of rows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.config import ExchangeDtypes
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.distributed.lookup.packed_ids import IdPacking
from dlrm_autoshard.distributed.lookup.row_ranges import RowRanges
from dlrm_autoshard.distributed.lookup.shared_memory import Put, SharedMemory
from dlrm_autoshard.distributed.lookup.wire import Wire
from dlrm_autoshard.plan import ShardingPlan, shards_by_table

# Axes: B samples per rank, W ranks, D embedding dims. id_distribution.py describes how ids are packed.

Margin = tuple[int, int]
"""Columns left free before and after the pooled vectors for the model to fill."""


def with_margin(pooled_BD: Tensor, margin: Margin, into: Tensor | None = None) -> Tensor:
    """Returns [B, margin + D + margin] with uninitialized margins; its gradient is a view. into: memory to use."""
    if into is not None:
        into[:, margin[0] : into.shape[1] - margin[1]] = pooled_BD
        return into
    before, after = (pooled_BD.new_empty(len(pooled_BD), columns) for columns in margin)
    return torch.cat([before, pooled_BD, after], 1)


def without_margin(output: Tensor, margin: Margin) -> Tensor:
    """Returns [B, D], contiguous."""
    before, after = margin
    return output[:, before : output.shape[1] - after].contiguous()


class Pending:
    """A collective in progress. `wait()` returns what arrived, also when called again."""

    def __init__(self, finish: Callable[[], object] | None, result: Tensor, *kept_alive: Tensor) -> None:
        self._finish, self.result, self._kept_alive = finish, result, kept_alive

    def wait(self) -> Tensor:
        if self._finish is not None:
            self._finish()
            self._finish, self._kept_alive = None, ()
        return self.result


@dataclass
class Exchange:
    """Who sends what to whom under one plan. Made again when the plan changes; holds no rows.

    empty: allocates memory for arriving data, given a tensor and a number of elements. replicated: tables copied to
    every rank, whose output columns are left free. packs_ids: send ids in few bytes, for slow networks.
    """

    features: Features
    plan: ShardingPlan
    rank: int
    group: dist.ProcessGroup
    id_group: dist.ProcessGroup
    device: torch.device
    dtypes: ExchangeDtypes = field(default_factory=ExchangeDtypes)
    link: SharedMemory | None = None
    replicated: frozenset[str] = frozenset()
    packs_ids: bool = False
    empty: Callable[[Tensor, int], Tensor] = Tensor.new_empty
    _layouts: dict[tuple[int, Margin], _Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world_size, rank_of = self.plan.world_size, self.plan.rank_of
        placed = [table for table in self.features.tables if table.name not in self.replicated]
        shards_of = {t.name: shards for t, shards in zip(placed, shards_by_table(placed, self.plan), strict=True)}
        by_table = [shards_of.get(table.name, ()) for table in self.features.tables]
        pooled, table_of = self.features.output_order(), self.features.table_of
        order = self.features.lookup_order() if self.features.sequences else pooled
        # A lookup needs features of one shard side by side (fbgemm), and shards of one format together.
        features_of = dict[int, list[int]]()
        for feature in order:
            features_of.setdefault(table_of[feature], []).append(feature)
        formats = list(dict.fromkeys((table.dtype, table.optimizer) for table in self.features.tables))
        apart, format_of = self.features.sequence_tables, [(t.dtype, t.optimizer) for t in self.features.tables]
        tables = sorted(features_of, key=lambda table: (table in apart, formats.index(format_of[table])))
        looked_up = [(s, feature) for table in tables for s in by_table[table] for feature in features_of[table]]
        self.owned = owned = [
            [(s, f) for s, f in looked_up if rank_of[s.name] == rank] for rank in range(self.world_size)
        ]
        """Each rank's lookups: (shard, feature number)."""
        self.local_lookups = tuple(shard for shard, _ in owned[self.rank])
        """The shard of each of this rank's lookups, in order."""
        self.local_shards = tuple(dict.fromkeys(self.local_lookups))
        self.num_local = len(self.local_lookups)
        ends = list(itertools.accumulate(map(len, owned), initial=0))
        self.table_ranges = list(itertools.pairwise(ends))
        """Each rank's range in `owners_order`."""
        self.row_ranges = RowRanges(self.features, self.plan)
        self.owners_order = [self.row_ranges.number(feature, shard) for own in owned for shard, feature in own]
        """Number of the feature whose ids each lookup takes; ids go to the owner of every column shard."""
        self.send_order: Tensor | None = None  # None if the batch is already in the owners' order
        if self.owners_order != list(range(len(self.row_ranges.tables))):
            self.send_order = torch.tensor(self.owners_order, dtype=torch.int32, device=self.device)
        self._each_once = sorted(self.owners_order) == list(range(len(self.row_ranges.tables)))
        by_rank = [rank * self.num_local + t for t in range(self.num_local) for rank in range(self.world_size)]
        self.table_major = torch.tensor(by_rank, dtype=torch.int32, device=self.device)
        """Order that turns rank-major arrivals into lookup-major ones."""
        self.is_pooled = is_pooled = frozenset(pooled)
        self.dims = [sum(shard.embedding_dim for shard, f in own if f in is_pooled) for own in owned]
        self.total_dim = sum(self.dims)
        self.packing = IdPacking.of(self.row_ranges.tables) if self.packs_ids else None
        dtypes = self.dtypes if self.world_size > 1 else ExchangeDtypes()  # a single rank rounds nothing
        self._vectors, self._gradients = (Wire(d, self.features.tables) for d in (dtypes.vectors, dtypes.gradients))
        self.wires = self._vectors, self._gradients
        # Output order, in chunks as wide as all shards' dims allow: where each chunk lies among the arriving ones.
        self.chunk = math.gcd(*(s.embedding_dim for s in (*self.features.features, *itertools.chain(*by_table))))
        first_chunk = dict[tuple[str, int], int]()
        for own in owned:
            position = 0
            for shard, feature in own:
                if feature in is_pooled:
                    first_chunk[shard.name, feature] = position
                    position += shard.embedding_dim // self.chunk
        starts = list(itertools.accumulate(self.dims, initial=0))
        ends = list(itertools.accumulate((self.features.features[i].embedding_dim for i in pooled), initial=0))
        self.width = ends[-1] // self.chunk
        where = list[tuple[int, int, int, int, int]]()
        for feature, first in zip(pooled, ends, strict=False):
            sums = Counter[int]()  # row shards added so far to each output chunk, in order
            for shard in by_table[table_of[feature]]:
                owner, begins = rank_of[shard.name], (first + shard.columns[0]) // self.chunk
                base, stride = starts[owner] // self.chunk, self.dims[owner] // self.chunk
                for chunk in range(shard.embedding_dim // self.chunk):
                    column = first_chunk[shard.name, feature] + chunk
                    where.append((sums[begins + chunk], base, stride, column, begins + chunk))
                    sums[begins + chunk] += 1
        where.sort(key=lambda chunk: (chunk[0], chunk[-1]))
        self.sums = [len(list(same)) for _, same in itertools.groupby(turn for turn, *_ in where)]
        """Numbers of output chunks with at least one term, two terms, ..."""
        columns = [column for *_, column, _ in where]
        self._as_looked_up = self.world_size == 1 and len(self.sums) < 2 and columns == sorted(columns)
        """A single rank's lookup is the output as it is."""
        self.where = torch.tensor([chunk[1:] for chunk in where], dtype=torch.int64, device=self.device).view(-1, 4).T

    @property
    def local_dim(self) -> int:
        return self.dims[self.rank]

    def ids_sent(self, batch: Batch) -> int:
        """Returns the number of ids that a batch sends, split by `row_ranges`; once per column shard."""
        if self._each_once:
            return batch.values_N.numel()
        return int(batch.lengths_TB.sum(1)[self.owners_order].sum())

    def send_pooled(self, local: Tensor) -> Pending:
        """Sends this rank's vectors, local [W * B, D_local]; they arrive as rank-major blocks (`in_output_order`)."""
        local, batch_size = local.detach(), local.shape[0] // self.world_size
        if self.world_size == 1 or not self.total_dim:
            return Pending(None, local[:batch_size])
        sent, (own, each) = self._vectors.encode(local), self._splits(self._vectors, batch_size)
        return self.all_to_all("vectors", self.empty(sent, sum(each)), sent, each, own)

    def in_output_order(self, arrived: Tensor, margin: Margin = (0, 0), into: Tensor | None = None) -> Tensor:
        """Returns [B, margin + D + margin] float32 in output order from the arrived vectors; margins uninitialized.
        into: memory to use."""
        if not self.total_dim:  # only sequences travel
            return with_margin(arrived.new_empty(len(arrived), self.width * self.chunk), margin, into)
        if self._as_looked_up:
            return with_margin(arrived, margin, into) if any(margin) or into is not None else arrived
        if self.ends_inside_a_chunk(margin):
            return with_margin(self.in_output_order(arrived), margin, into)
        wire = self._vectors
        batch_size, chunk = arrived.numel() // wire.size(self.total_dim), wire.size(self.chunk)
        layout = self._layout(batch_size, margin)
        index = layout.index
        if into is not None and into.dtype == arrived.dtype and not layout.more:
            torch.index_select(arrived.view(-1, chunk), 0, index, out=into.view(-1, chunk))
            return into
        ordered = self.empty(arrived, len(index) * chunk)
        torch.index_select(arrived.view(-1, chunk), 0, index, out=ordered.view(-1, chunk))
        decoded = wire.decode(ordered).view(batch_size, -1)
        for places, sources in layout.more:
            part = wire.decode(arrived.view(-1, chunk).index_select(0, sources))
            decoded.view(-1, self.chunk).index_add_(0, places, part.view(-1, self.chunk))
        return decoded if into is None else into.copy_(decoded)

    def send_gradients(self, gradient_BD: Tensor, margin: Margin = (0, 0)) -> Pending:
        """Sends gradients of the pooled output to the owners (`as_gradient`)."""
        if self._as_looked_up:
            return Pending(None, without_margin(gradient_BD, margin))
        if not self.total_dim:
            return Pending(None, gradient_BD[:, :0])
        if self.ends_inside_a_chunk(margin):
            gradient_BD, margin = without_margin(gradient_BD, margin), (0, 0)
        batch_size, wire = gradient_BD.shape[0], self._gradients
        chunks = wire.encode(gradient_BD, shares=batch_size * self.world_size).view(-1, wire.size(self.chunk))
        own, each = self._splits(wire, batch_size)
        rows = self._layout(batch_size, margin).rows
        if self.world_size == 1:
            return Pending(None, chunks.index_select(0, rows[0]).view(batch_size, -1))
        return self.all_to_all(
            "vectors",
            self.empty(chunks, sum(own)),
            lambda rank, into: torch.index_select(chunks, 0, rows[rank], out=into.view(-1, chunks.shape[1])),
            own,
            each,
        )

    def _splits(self, wire: Wire, batch_size: int) -> tuple[list[int], list[int]]:
        """Returns the elements of own vectors for each rank, and of each rank's vectors for this one."""
        own = [wire.size(batch_size * self.local_dim)] * self.world_size
        return own, [wire.size(batch_size * dim) for dim in self.dims]

    def as_gradient(self, arrived: Tensor) -> Tensor:
        """Returns [W * B, D_local] float32 from the arrived gradients."""
        if not self.local_dim:
            return arrived.float()
        samples = arrived.numel() // self._gradients.size(self.local_dim)
        return self._gradients.decode(arrived, shares=samples).view(samples, -1)

    def ends_inside_a_chunk(self, margin: Margin) -> bool:
        """Returns whether a margin is not a multiple of the chunk, so that chunks cannot be placed around it."""
        return any(columns % self.chunk for columns in margin)

    def send_lengths(self, lengths: Tensor, batch_size: int, note: Tensor | None = None) -> Pending:
        """Sends bag lengths [T, B] in `owners_order` to the owners; they arrive as [W, T_local, B], flat. note: sent to
        every rank in front of them, with their dtype: [W, len(note) + T_local * B]."""
        note = lengths.new_empty(0) if note is None else note
        flat, extra = lengths.reshape(-1), len(note)
        own = [flat[first * batch_size : end * batch_size] for first, end in self.table_ranges]
        return self.all_to_all(
            "lengths",
            lengths.new_empty(self.world_size * (extra + self.num_local * batch_size)),
            lambda rank, into: torch.cat([note, own[rank]], out=into),
            [extra + self.num_local * batch_size] * self.world_size,
            [extra + (end - first) * batch_size for first, end in self.table_ranges],
        )

    def all_to_all(
        self, channel: str, received: Tensor, sent: Tensor | Put, receive_splits: list[int], send_splits: list[int]
    ) -> Pending:
        """Exchanges through shared memory if all ranks are on one host, else through the process group.

        Tensors are one-dimensional; splits in elements, by rank. sent: by rank, or a function that writes a rank's
        part."""
        if self.link is not None:
            return Pending(self.link.all_to_all(channel, received, sent, receive_splits, send_splits), received)
        if not isinstance(sent, Tensor):
            put, sent = sent, self.empty(received, sum(send_splits))
            for rank, part in enumerate(sent.split(send_splits)):
                if len(part):
                    put(rank, part)
        group = self.id_group if channel in ("lengths", "values", "weights") else self.group
        work = dist.all_to_all_single(received, sent, receive_splits, send_splits, group=group, async_op=True)
        return Pending(work.wait, received, sent)  # type: ignore[union-attr, unused-ignore]

    def _layout(self, batch_size: int, margin: Margin) -> _Layout:
        """Caches the layouts of the few batch sizes that occur in a run."""
        key = (batch_size, margin)
        if key not in self._layouts:
            base, stride, column, places = self.where
            before, after = (columns // self.chunk for columns in margin)
            rows = torch.arange(batch_size, device=self.device)[:, None]
            source = base * batch_size + rows * stride + column
            width = before + self.width + after
            index = torch.zeros(batch_size, width, dtype=torch.int64, device=self.device)
            at = rows * width + before + places
            turns = list(zip(at.split(self.sums, 1), source.split(self.sums, 1), strict=True)) if self.sums else []
            for first, taken in turns[:1]:
                index.view(-1)[first] = taken
            inverse = torch.empty(source.numel(), dtype=torch.int64, device=self.device)
            inverse[source] = at
            if len(self._layouts) > 4:
                self._layouts.clear()
            splits = [batch_size * dim // self.chunk for dim in self.dims]
            more = [(first.reshape(-1), taken.reshape(-1)) for first, taken in turns[1:]]
            self._layouts[key] = _Layout(index.view(-1), list(inverse.split(splits)), more)
        return self._layouts[key]


@dataclass(frozen=True)
class _Layout:
    """index: which arriving chunk goes to each output chunk. rows: for each rank, the output chunks of its tables.
    more: output chunks, and the arriving chunks to add to them."""

    index: Tensor
    rows: list[Tensor]
    more: list[tuple[Tensor, Tensor]]
