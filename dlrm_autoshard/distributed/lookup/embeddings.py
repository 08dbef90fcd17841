"""Embedding tables sharded over ranks: each rank looks up its shards for all ranks' samples, and updates them.

ids = embeddings.distribute(batch).finish()
local = embeddings.lookup(ids)                               # [W * B, D_local]
pooled = exchange.in_output_order(exchange.send_pooled(local).wait())    # [B, D], by embeddings.exchange
embeddings.update(local, exchange.send_gradients(pooled_gradient).wait())
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dlrm_autoshard.config import ExchangeDtypes, TablesConfig
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.distributed.device import SideStreams
from dlrm_autoshard.distributed.lookup.columns import Clipping, Means
from dlrm_autoshard.distributed.lookup.dedup import Dedup
from dlrm_autoshard.distributed.lookup.device_ids import DeviceIdDistribution
from dlrm_autoshard.distributed.lookup.exchange import Exchange
from dlrm_autoshard.distributed.lookup.id_distribution import IdDistribution, LocalIds
from dlrm_autoshard.distributed.lookup.link_speed import SLOW_FOR_IDS, mb_per_s
from dlrm_autoshard.distributed.lookup.replicas import Replicas
from dlrm_autoshard.distributed.lookup.sequences import RowsOnce, SequencePlan
from dlrm_autoshard.distributed.lookup.shared_memory import connect
from dlrm_autoshard.distributed.lookup.wire import Wire
from dlrm_autoshard.distributed.sums import sums_by
from dlrm_autoshard.distributed.tables.init import start
from dlrm_autoshard.distributed.tables.rowwise_adagrad import faster_on_all
from dlrm_autoshard.distributed.tables.storage import Storage
from dlrm_autoshard.plan import PlanError, ShardingPlan, shard_tables
from dlrm_autoshard.tables import TableConfig


class ShardedEmbeddings:
    """All tables of the model; this rank owns the shards `plan.shards_on(rank)`.

    Holds the live plan, equal on every rank, and the exchange under it. tables: those that the plan places. replicas:
    the others, if any, which are copied to every rank.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig] | Features,
        plan: ShardingPlan,
        config: TablesConfig,
        *,
        rank: int,
        group: dist.ProcessGroup,
        id_group: dist.ProcessGroup,
        device: torch.device,
        exchange_dtype: ExchangeDtypes | None = None,
        seed: int = 0,
        shared_memory: bool = True,
        initial_values: bool = True,
        storage: Storage | None = None,
        streams: SideStreams | None = None,
        replicated: Collection[str] = (),
        rows_once: bool | None = False,
        dedup: Collection[str] | None = (),
    ) -> None:
        """shared_memory: use it for exchanges if all ranks are on one host. initial_values: False if a checkpoint will
        be loaded. storage, streams: default the device's. tables: as Features if some share a table. replicated: tables
        outside the plan. rows_once: None: decided by the first batch. dedup: tables whose pooled features send each
        distinct id once (dedup.py); None: decided by the first batch."""
        self.features = tables if isinstance(tables, Features) else Features.one_each(tables)
        self.tables = tuple(table for table in self.features.tables if table.name not in replicated)
        self.config, self.rank, self.device = config, rank, device
        self.groups, self.exchange_dtype = (group, id_group), exchange_dtype or ExchangeDtypes()
        self._link = connect(group) if shared_memory and device.type == "cpu" else None
        self.rows_once = RowsOnce(self.features, rows_once, id_group, in_memory=self._link is not None)
        self.carried = mb_per_s(id_group) if self._link is None and device.type == "cpu" else float("inf")
        self.dedup = Dedup(self.features, dedup, group, device)
        self.updates = 0  # training lookups so far: fbgemm's `iter`, which must survive rebuilding
        self.learning_rate = config.optimizer.lr
        counts = self.features.counts
        shared = counts if max(counts.values()) > 1 else None
        loop = faster_on_all(id_group) if device.type == "cpu" else None
        apart = self.features.sequence_table_names
        self.storage = storage or Storage(self.tables, config, device, features=shared, plain_loop=loop, apart=apart)
        self.streams = streams or (None if device.type == "cpu" else SideStreams(device))
        self.replicas: Replicas | None = None
        if replicated:
            sums = sums_by(group, self._link)
            self.replicas = Replicas(self.features, replicated, config.optimizer, device, sums, self.streams, seed)
        self._replicated = frozenset(replicated)
        self.clipping = Clipping.where_needed(self.features, config.optimizer, device)
        self.adopt(plan)
        if initial_values:
            rows_of = {table.name: table.num_embeddings for table in self.tables}
            for shard in self.local_shards:
                start(self.storage.tensors(shard.shard)["weight"], shard, seed, rows_of[shard.shard.table])

    @property
    def replicated(self) -> tuple[TableConfig, ...]:
        """Tables copied to every rank, outside the plan."""
        return () if self.replicas is None else self.replicas.tables

    @property
    def output_tables(self) -> tuple[TableConfig, ...]:
        """The table of each feature, under the feature's name, in the order of the pooled output's columns."""
        return tuple(self.features.features[i] for i in self.features.output_order())

    @property
    def local_shards(self) -> tuple[TableConfig, ...]:
        """This rank's shards in the order of its lookup; column and row shards are tables of their own."""
        return self.exchange.local_shards

    @property
    def local_lookups(self) -> tuple[TableConfig, ...]:
        """This rank's shards, each once per feature."""
        return self.exchange.local_lookups

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @property
    def local_dim(self) -> int:
        """Sum of the dims of this rank's shards."""
        return self.exchange.local_dim

    def adopt(self, plan: ShardingPlan) -> None:
        """Makes `plan` the live one. `storage.tensors(name)` must already hold arriving shards."""
        self.check(plan)
        self.plan = plan.ordered([table.name for table in self.tables])
        group, id_group = self.groups
        self.exchange = Exchange(
            self.features, self.plan, self.rank, group, id_group, self.device, self.exchange_dtype, self._link,
            self._replicated, packs_ids=self.carried < SLOW_FOR_IDS,
        )  # fmt: skip
        self.sequences = SequencePlan(self.exchange)
        self.means = Means.where_needed(
            self.features, self.device, self._replicated, partial=bool(plan.row_split_tables)
        )
        """For the caller, to divide pooled vectors and their gradients."""
        self.storage.hold([shard.shard for shard in self.local_shards], sums=self.means is not None)
        self.storage.set_updates(self.updates)
        self.set_learning_rate(self.learning_rate)

    def check(self, plan: ShardingPlan) -> None:
        """Raises PlanError if the plan is of other tables, or splits some whose optimizer state does not allow it."""
        shard_tables(self.tables, plan)
        if refused := self.features.sequence_table_names.intersection(plan.row_split_tables):
            raise PlanError(
                f"the plan splits table '{min(refused)}' by rows, but a sequence looks it up, which needs all "
                "rows on one rank. Split it by columns, or set autoshard.splits.rows: never."
            )
        for dtype in {self.exchange_dtype.vectors, self.exchange_dtype.gradients}:
            Wire(dtype, self.features.tables).check(plan)
        tables, others = {table.name: table for table in self.tables}, self.config.optimizer.splits_tables
        whole = [name for name in plan.column_split_tables if not tables[name].may_split(others)]
        if whole:
            raise PlanError(
                f"the plan splits table '{whole[0]}' by columns, but row-wise Adagrad keeps one sum of squares per row "
                "over all columns. Set tables.optimizer.per_part: true for a sum per row and shard, which is another "
                "optimizer; or use adagrad, or a plan without column shards."
            )

    def distribute(self, batch: Batch) -> IdDistribution | DeviceIdDistribution:
        """Starts sending the batch's ids, which are in host memory, to the owners."""
        if self.streams is not None:
            return DeviceIdDistribution(self.exchange, batch, self.streams)
        return IdDistribution(self.exchange, batch)

    def dense_on_device(self, batch: Batch) -> Batch:
        """Starts copying dense features and labels to the device; ids stay for `distribute`."""
        if self.streams is None:
            return batch
        loss_weights_B = None if batch.loss_weights_B is None else self.streams.copy(batch.loss_weights_B)
        dense_BF, labels_B = self.streams.copy(batch.dense_BF), self.streams.copy(batch.labels_B)
        return replace(batch, dense_BF=dense_BF, labels_B=labels_B, loss_weights_B=loss_weights_B)

    @property
    def batches_ahead(self) -> int:
        """Number of batches whose ids are sent before the first is looked up: 2 on a GPU, so that a batch's rows can be
        fetched to the device while the one before is computed."""
        return 1 if self.streams is None else 2

    def prefetch(self, ids: LocalIds) -> None:
        """Fetches rows of the next training lookup's ids from host memory to the device, beside its computation."""
        self.storage.prefetch(ids.values_N, ids.offsets)

    def lookup(self, ids: LocalIds, *, training: bool = True) -> Tensor:
        """Returns pooled vectors [W * B, D_local] of the local tables for the global batch; when training, their
        gradient function is the fused update. Tables with sequences are excluded: see sequences.py."""
        ids = self.sequences.fused(ids)
        if not self.storage.lookups:
            self.updates += training  # also counts on a rank without tables, which may get some
            return torch.zeros(self.world_size * ids.batch_size, 0, device=self.device, requires_grad=training)
        pooled = self.storage.look_up(ids.values_N, ids.offsets, ids.weights_N, training=training)
        if training:
            self.updates += 1
        else:
            self.storage.set_updates(self.updates)
        return pooled

    def update(self, lookup: Tensor | GradientEdge, gradient: Tensor) -> None:
        """Runs fused backward and optimizer step of the local tables. lookup: the result of `lookup`, or its gradient
        edge. gradient: as it arrived by the exchange."""
        if self.local_dim:
            torch.autograd.backward(lookup, self.exchange.as_gradient(gradient))

    def set_learning_rate(self, lr: float) -> None:
        self.learning_rate = lr
        if self.replicas is not None:
            self.replicas.learning_rate = lr
        self.storage.set_learning_rate(lr)

    def take_back_lookup(self) -> None:
        """Undoes the count of the last training lookup, which no update will follow."""
        self.storage.take_back_lookup()
        self.set_updates(self.updates - 1)

    def set_updates(self, updates: int) -> None:
        self.updates = updates
        self.storage.set_updates(updates)
