"""The tables as one module for any training loop: `loss.backward()` averages their gradients and updates them.

bags = ShardedEmbeddingBags(tables, optimizer=RowwiseAdagrad(lr=0.02))       # ranks: torch.distributed's
pooled_BD = bags.forward(lengths_TB, values_N)       # or with weights_N; or a KeyedJaggedTensor; called as a module
for batch, ids in bags.ahead(batches, ids_of): bags(ids)                     # the next batch's ids travel meanwhile
bags.plan; bags.table_lr = 0.01; bags.state_dict()                           # of the tables that this rank owns
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import get_gradient_edge

from dlrm_autoshard.config import TableOptimizerConfig, TablesConfig
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.distributed.lookup.bag_inputs import BagInputs, BagsError, check_alone, features_given
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.exchange import Pending
from dlrm_autoshard.distributed.lookup.id_distribution import LocalIds
from dlrm_autoshard.distributed.lookup.sent_ids import IdsAhead, SentIds
from dlrm_autoshard.distributed.moves.movable import ArrivedIds
from dlrm_autoshard.distributed.moves.reshard import ReshardStats, reshard
from dlrm_autoshard.distributed.ranks.agreement import agree, facts_of
from dlrm_autoshard.distributed.ranks.runtime import runtime_of
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.distributed.tables.optimizers import RowwiseAdagrad
from dlrm_autoshard.distributed.tables.saved_parts import assembled
from dlrm_autoshard.plan import PlanError, ShardingPlan, Topology, round_robin
from dlrm_autoshard.tables import Shard, TableConfig

AnyBatch = TypeVar("AnyBatch")


class ShardedEmbeddingBags(nn.Module):
    """All tables of a model; each rank owns those that `plan` gives it. Made and called on every rank of `group`."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        optimizer: TableOptimizerConfig | None = None,
        plan: ShardingPlan | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        exchange_dtype: str = "fp32",
        check_ids: bool = True,
        seed: int = 0,
        features: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """optimizer: fused into the backward pass; RowwiseAdagrad() by default. plan: round robin by default.
        UserError, on every rank, where ranks are not given the same.

        group: the ranks; torch.distributed's default group, which is made for this process alone where there is none.
        device: the current GPU where NCCL carries the group's tensors, else the CPU.
        exchange_dtype: in which vectors travel between ranks: fp32, fp16 or bf16. check_ids: refuse ids beyond their
        table (on a GPU that waits for the device). seed: of the initial weights, which no plan changes. features: table
        -> those that look up its rows, in the place of one of its name.
        """
        super().__init__()
        if not isinstance(group, dist.ProcessGroup | None):  # torch gives a number to ranks that are not in a new group
            raise BagsError(f"group is {group!r}: this rank is not in it. Only the ranks of a group make its tables.")
        if not dist.is_initialized():
            check_alone()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = group or dist.group.WORLD
        assert group is not None
        self.runtime = runtime_of(group, device)
        self.device, self.exchange_dtype = self.runtime.device, exchange_dtype
        self.shared_memory = True

        def checked() -> tuple[Features, TableOptimizerConfig, ShardingPlan]:
            own = RowwiseAdagrad() if optimizer is None else optimizer
            found = features_given(tables, features or {}, exchange_dtype, own)
            names = [table.name for table in tables]
            taken = plan or round_robin(names, Topology(self.world_size))
            taken.check_tables(names)
            if taken.world_size != self.world_size:
                raise PlanError(f"the plan is for {taken.world_size} ranks, and the group has {self.world_size}.")
            return found, own, taken

        self.features, optimizer, plan = self.runtime.on_all(checked)
        self.tables = tuple(tables)
        own = {f"the optimizer's {key}": value for key, value in optimizer.model_dump().items()}
        own |= {f"features['{name}']": ", ".join(named) for name, named in (features or {}).items()}
        own |= {"exchange_dtype": exchange_dtype, "seed": seed, "device": self.device.type, "torch": torch.__version__}
        agree(self.runtime, facts_of(self.tables, plan) | own)
        self.sharded = ShardedEmbeddings(
            self.features,
            plan,
            TablesConfig(optimizer=optimizer),
            rank=self.runtime.rank,
            group=group,
            id_group=self.runtime.id_group,
            device=self.device,
            exchange_dtype=exchange_dtype,
            seed=seed,
        )
        self.clock = StageClock(self.device, self.runtime.control if self.device.type == "cpu" else group)
        self._inputs = BagInputs(self.features.features, self.runtime.rank, check_ids=check_ids)
        self._columns = _columns_as_given(self.features.features, self.sharded.output_tables, self.device)
        self._between = ExitStack()  # the stage between lookup and gradient, while it lasts
        self._heard: list[Callable[[ArrivedIds, int], None]] = []
        self._ahead = IdsAhead(self.clock)

    # -- what people ask -----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> ShardingPlan:
        """The live one."""
        return self.sharded.plan

    @property
    def rank(self) -> int:
        return self.runtime.rank

    @property
    def world_size(self) -> int:
        return self.runtime.world_size

    @property
    def table_lr(self) -> float:
        """The fused optimizer's learning rate; set it between steps."""
        return self.sharded.learning_rate

    @table_lr.setter
    def table_lr(self, lr: float) -> None:
        self.sharded.set_learning_rate(lr)

    def split(self, pooled_BD: Tensor) -> dict[str, Tensor]:
        """The columns of each table, or of each of its features, by name: [B, dim] each."""
        parts = pooled_BD.split([feature.embedding_dim for feature in self.features.features], dim=1)
        return {feature.name: part for feature, part in zip(self.features.features, parts, strict=True)}

    def on_lookup(self, listener: Callable[[ArrivedIds, int], None]) -> None:
        """`listener(ids, B)` hears of each training lookup: the ids that reached this rank, the samples of one rank."""
        self._heard.append(listener)

    def move_to(self, plan: ShardingPlan, *, checksums: bool = False) -> ReshardStats:
        """Makes `plan` the live one, between steps, on every rank; no bit of the model changes. See `reshard`."""
        self._ahead.arrive(timed=False)
        return reshard(self.sharded, plan, group=self.runtime.control, checksums=checksums)

    def forward(self, ids: Any, values_N: Tensor | None = None, weights_N: Tensor | None = None) -> Tensor:
        """[B, sum of dims] float32, columns in the tables' order; B must be the same on every rank.

        ids: lengths [T, B] (or [T * B]) with `values_N`, all of table 0's ids first; or a KeyedJaggedTensor, whose keys
        are the tables' names in any order. weights_N: by which each id's row is multiplied; on every rank or on none.
        A table's `features`, where several were named, each count as a table here, in their order.
        """
        sent = self._given(ids, values_N, weights_N)
        training = self.training and torch.is_grad_enabled()
        if training:
            self._between.close()  # of a lookup before, which no backward pass has followed yet
        local = sent.arrived or self._ahead.bring(sent, timed=training)
        if training:
            for listener in self._heard:
                listener(local, local.batch_size)
            anchor = torch.zeros((), device=self.device, requires_grad=True)
            pooled: Tensor = _Lookup.apply(anchor, self, local, sent.batch.lengths_TB)
        else:
            pooled = self._arrived(self.sharded.lookup(local, training=False), sent.batch.lengths_TB)
        return pooled

    def send(self, ids: Any, values_N: Tensor | None = None, weights_N: Tensor | None = None) -> SentIds:
        """Sends ids, given as to `forward`, to their tables' owners: they travel during the backward pass that follows.
        On every rank; `forward` takes what this returns in their place. Tables may have moved meanwhile."""
        sent = self._given(ids, values_N, weights_N)
        self._ahead.send(sent)
        return sent

    def ahead(
        self, batches: Iterable[AnyBatch], ids_of: Callable[[AnyBatch], Any]
    ) -> Iterator[tuple[AnyBatch, SentIds]]:
        """Batches with their ids, which are sent one batch ahead; give them to `forward`. ids_of: of a batch, what
        `forward` takes: a tuple (lengths_TB, values_N), or with weights_N, or a KeyedJaggedTensor."""
        waiting: deque[tuple[AnyBatch, SentIds]] = deque()
        for batch in batches:
            ids = ids_of(batch)
            waiting.append((batch, self.send(*ids) if isinstance(ids, tuple) else self.send(ids)))
            if len(waiting) > 1:
                yield waiting.popleft()
        yield from waiting

    def _given(self, ids: Any, values_N: Tensor | None, weights_N: Tensor | None) -> SentIds:
        if not isinstance(ids, SentIds):
            return SentIds(self._inputs.batch(ids, values_N, weights_N), self.sharded)
        if ids.embeddings is not self.sharded:
            raise BagsError("these ids were sent by other ShardedEmbeddingBags. Give each what its own `send` returns.")
        if values_N is not None or weights_N is not None:
            raise BagsError("ids that were sent already have their values and weights with them.")
        return ids

    def _arrived(self, looked_up: Tensor, lengths_TB: Tensor) -> Tensor:
        """Pooled vectors of this rank's samples, from what each rank has looked up; columns in the tables' order."""
        pooled_BD = self.sharded.in_output_order(self.sharded.send_pooled(looked_up).wait())
        if self.sharded.means is not None:
            self.sharded.means.divide_(pooled_BD, lengths_TB)
        return pooled_BD if self._columns is None else pooled_BD.index_select(1, self._columns[0])

    def _send_back(self, gradient_BD: Tensor, lengths_TB: Tensor) -> Pending:
        """Their gradients, to those who have looked them up: a mean over ranks, as DDP takes it of the dense part's."""
        gradient_BD = gradient_BD / self.sharded.world_size
        if self._columns is not None:
            gradient_BD = gradient_BD.index_select(1, self._columns[1])
        if self.sharded.means is not None:
            self.sharded.means.divide_(gradient_BD, lengths_TB)
        return self.sharded.send_gradients(gradient_BD.contiguous())

    # -- checkpoints: keys that no plan changes ------------------------------------------------------------------------

    def own_tensors(self) -> dict[str, Tensor]:
        """Live views of this rank's rows and optimizer state: `NAME.weight`, `NAME.momentum1`; of a split table, its
        columns: `NAME[0:64].weight`. They load under any plan."""
        tensors_of = self.sharded.storage.tensors
        return {
            f"{name}.{key}": value for name in self.plan.tables_on(self.rank) for key, value in tensors_of(name).items()
        }

    def get_extra_state(self) -> dict[str, Any]:
        """Plain data: what the tensors leave out."""
        return {"updates": self.sharded.updates, "table_lr": self.table_lr, "plan": self.plan.to_json()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self.sharded.set_updates(int(state["updates"]))
        self.table_lr = float(state["table_lr"])

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}{name}": value.detach() for name, value in self.own_tensors().items()})

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        own = self.own_tensors()
        known = {table.name for table in self.tables}
        saved_here = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        theirs = {key: value for key, value in saved_here.items() if Shard.parse(key.rsplit(".", 1)[0]).table in known}
        rest = {key: value for key, value in state_dict.items() if key[len(prefix) :] not in theirs}
        super()._load_from_state_dict(rest, prefix, metadata, strict, missing, unexpected, errors)
        for name, value in own.items():
            saved = assembled(theirs, name, value)
            if saved is None:
                missing.append(prefix + name)
            elif saved.shape != value.shape:
                errors.append(f"{prefix}{name} is {list(saved.shape)}, the model has {list(value.shape)}")
            else:
                value.copy_(saved)
        self.sharded.storage.overwritten()


class _Lookup(torch.autograd.Function):
    """Lookup and exchange forward; gradients to their owners and the fused update backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, anchor: Tensor, bags: ShardedEmbeddingBags, ids: LocalIds, lengths_TB: Tensor
    ) -> Tensor:
        sharded, clock = bags.sharded, bags.clock
        with clock.stage("fwd_compute"), torch.enable_grad():
            local = sharded.lookup(ids)
        clock.barrier("fwd_comms")
        with clock.stage("fwd_comms"):
            pooled = bags._arrived(local, lengths_TB)
        ctx.bags, ctx.edge, ctx.lengths_TB = bags, get_gradient_edge(local), lengths_TB  # type: ignore[attr-defined]
        bags._between.enter_context(clock.stage("dense_fwd"))
        return pooled

    @staticmethod
    def backward(ctx: FunctionCtx, gradient_BD: Tensor) -> tuple[None, None, None, None]:
        bags: ShardedEmbeddingBags = ctx.bags  # type: ignore[attr-defined]
        sharded, clock = bags.sharded, bags.clock
        bags._between.close()
        clock.barrier("bwd_comms")
        with clock.stage("bwd_comms"):
            gradients = bags._send_back(gradient_BD, ctx.lengths_TB)  # type: ignore[attr-defined]
            bags._ahead.send_values()
            arrived = gradients.wait()
        with clock.stage("bwd_compute"):
            sharded.update(ctx.edge, arrived)  # type: ignore[attr-defined]
        bags._ahead.arrive(timed=True)
        return None, None, None, None


def _columns_as_given(
    tables: Sequence[TableConfig], output: Sequence[TableConfig], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Where each given column lies in the exchange's output, and each of those among the given; None where they lie in
    one order. Both, for what autograd makes of the first adds column by column."""
    names = [table.name for table in output]
    starts = dict(zip(names, itertools.accumulate((t.embedding_dim for t in output), initial=0), strict=False))
    columns = [starts[table.name] + i for table in tables for i in range(table.embedding_dim)]
    if columns == list(range(len(columns))):
        return None
    there = torch.tensor(columns, device=device)
    return there, there.argsort()
