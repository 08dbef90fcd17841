"""All tables as one module for any training loop: `loss.backward()` averages their gradients and updates them.

bags = ShardedEmbeddingBags(tables, optimizer=RowwiseAdagrad(lr=0.02))       # ranks: torch.distributed's
pooled_BD = bags.forward(lengths_TB, values_N)       # or with weights_N, or a KeyedJaggedTensor; call it as a module
lookup = bags.look_up(lengths_TB, values_N); pooled_BD = lookup.wait()       # the same, with other work in between
for batch, ids in bags.ahead(batches, ids_of): bags(ids)                     # sends the next batch's ids meanwhile
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.config import ExchangeDtypes, TableOptimizerConfig, TablesConfig
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.distributed.lookup.bag_inputs import BagInputs, BagsError, features_given
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.lookups import EmbeddingBags, SentIds
from dlrm_autoshard.distributed.lookup.wire import exchange_bytes
from dlrm_autoshard.distributed.moves.reshard import ReshardStats, reshard
from dlrm_autoshard.distributed.ranks.agreement import agree, facts_of
from dlrm_autoshard.distributed.ranks.groups import group_or_alone
from dlrm_autoshard.distributed.ranks.runtime import runtime_of
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.distributed.tables.optimizers import RowwiseAdagrad
from dlrm_autoshard.formats.words import some_of
from dlrm_autoshard.model.jagged import Looked
from dlrm_autoshard.plan import PlanError, ShardingPlan, Topology, round_robin
from dlrm_autoshard.plan.replicated import replicated_tables
from dlrm_autoshard.tables import Shard, TableConfig


class ShardedEmbeddingBags(EmbeddingBags):
    """All tables of a model; each rank owns those that `plan` gives it. Make and call it on every rank of `group`."""

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        optimizer: TableOptimizerConfig | None = None,
        plan: ShardingPlan | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        exchange_dtype: str | Mapping[str, str] = "fp32",
        check_ids: bool = True,
        seed: int = 0,
        features: Mapping[str, Sequence[str]] | None = None,
        average: bool = True,
        replicate: str | Sequence[str] = "none",
        batch_size: int | None = None,
        sequences: Sequence[str] = (),
        rows_once: bool | Literal["auto"] = "auto",
        dedup: Sequence[str] | Literal["auto", "none"] = "none",
    ) -> None:
        """optimizer: fused into the backward pass; default RowwiseAdagrad(). plan: default round robin. UserError, on
        every rank, if ranks are given different arguments.

        group: the ranks; default torch.distributed's default group, which is made for this process alone if there is
        none. device: default the current GPU if NCCL carries the group's tensors, else the CPU. exchange_dtype: dtype
        of vectors and gradients between ranks: fp32, fp16, bf16 or int8, or {'vectors': ..., 'gradients': ...}.
        check_ids: refuse ids beyond their table (on a GPU that waits for the device). seed: of initial weights, which
        are independent of the plan. features: table -> features that look it up, instead of one with its name. average:
        average gradients over ranks like DDP; False: sum them, for a loss that is this rank's share of the mean over
        all samples (saves a pass). replicate: names of tables copied to every rank, outside the plan; "auto": those
        whose gradients are fewer bytes than the vectors of `batch_size` samples of a rank. Their gradients travel with
        those of a `DataParallelDense(..., replicas=bags.replicas)`, otherwise by themselves in the backward pass.
        sequences: tables or features that are not pooled: their `Jagged` has a vector per id. rows_once: send each
        distinct row of a rank's sequences once, and their gradients summed; "auto": decide by the first batch, for good
        (saved states keep it). dedup: tables whose pooled features send each distinct id of a rank's batch once; for
        bags of one id. "auto": tables whose ids repeat, if exchanging the first batch so is faster, for good too.
        """
        group = group_or_alone(group)
        runtime = runtime_of(group, device)

        def checked() -> tuple[Features, TableOptimizerConfig, ShardingPlan, tuple[str, ...]]:
            own = RowwiseAdagrad() if optimizer is None else optimizer
            found = features_given(tables, features or {}, exchange_dtype, own, sequences)
            if rows_once not in (True, False, "auto"):
                raise BagsError(f"rows_once is {rows_once!r}; it must be True, False or 'auto'.")
            if isinstance(dedup, str) and dedup not in ("auto", "none"):
                raise BagsError(f"dedup is {dedup!r}; it must be 'auto', 'none' or a list of tables' names.")
            if replicate == "auto" and batch_size is None:
                raise BagsError('replicate="auto" needs batch_size=, the samples that one rank looks up in a step.')
            copied = replicated_tables(
                replicate,
                tables,
                features=found.counts,
                batch_size=batch_size or 0,
                world_size=runtime.world_size,
                exchange_bytes=exchange_bytes(ExchangeDtypes.model_validate(exchange_dtype)),
                optimizer=own.name,
                decays=own.weight_decay > 0,
                placed=plan.tables if plan else (),
                sequences=found.sequence_table_names,
            )
            names = [table.name for table in tables if table.name not in copied]
            taken = plan or round_robin(names, Topology(runtime.world_size))
            taken.check_tables(names)
            if taken.world_size != runtime.world_size:
                raise PlanError(f"the plan is for {taken.world_size} ranks, but the group has {runtime.world_size}.")
            return found, own, taken, copied

        found, optimizer, plan, replicated = runtime.on_all(checked)
        own = {f"the optimizer's {key}": value for key, value in optimizer.model_dump().items()}
        own |= {f"features['{name}']": ", ".join(named) for name, named in (features or {}).items()}
        dtypes = ExchangeDtypes.model_validate(exchange_dtype)
        own |= {"exchange_dtype": str(dtypes), "seed": seed, "average": average}
        own |= {"device": runtime.device.type, "torch": torch.__version__, "replicate": some_of(replicated)}
        own |= {
            "sequences": ", ".join(found.sequences),
            "rows_once": rows_once,
            "dedup": dedup if isinstance(dedup, str) else ", ".join(dedup),
        }
        agree(runtime, facts_of(tables, plan) | own)
        sharded = ShardedEmbeddings(
            found,
            plan,
            TablesConfig(optimizer=optimizer),
            rank=runtime.rank,
            group=group,
            id_group=runtime.id_group,
            device=runtime.device,
            exchange_dtype=dtypes,
            seed=seed,
            replicated=replicated,
            rows_once=None if rows_once == "auto" else rows_once,
            dedup=None if dedup == "auto" else () if dedup == "none" else dedup,
        )
        super().__init__(
            sharded,
            StageClock(runtime.device, runtime.clock_group),
            average=average,
            columns=_columns_as_given(found.pooled, sharded.output_tables, runtime.device),
        )
        self.runtime, self.features, self.shared_memory = runtime, found, True
        self.tables, self.exchange_dtype = tuple(tables), sharded.exchange_dtype
        self._inputs = BagInputs(found.features, runtime.rank, check_ids=check_ids)
        self._chooses_once, self._chooses_dedup = sharded.rows_once.chosen is None, sharded.dedup.chosen is None

    @property
    def rank(self) -> int:
        return self.runtime.rank

    @property
    def world_size(self) -> int:
        return self.runtime.world_size

    def split(self, pooled_BD: Tensor) -> dict[str, Tensor]:
        """Returns the columns [B, dim] of each pooled table, or of each of its features, by name."""
        parts = pooled_BD.split([feature.embedding_dim for feature in self.features.pooled], dim=1)
        return {feature.name: part for feature, part in zip(self.features.pooled, parts, strict=True)}

    def move_to(self, plan: ShardingPlan, *, checksums: bool = False) -> ReshardStats:
        """Makes `plan` the live one, between steps, on every rank, without changing a bit. See `reshard`."""
        self.arrive(timed=False)
        return reshard(self.sharded, plan, group=self.runtime.control, checksums=checksums)

    def forward(self, ids: Any, values_N: Tensor | None = None, weights_N: Tensor | None = None) -> Tensor | Looked:
        """Returns pooled vectors [B, sum of dims] in float32, columns in the tables' order; B must be equal on all
        ranks.

        ids: lengths [T, B] (or [T * B]) with `values_N`, all of table 0's ids first; or a KeyedJaggedTensor whose keys
        are the tables' names in any order. weights_N: factors on each id's row; on every rank or on none. If `features`
        were named, each counts as a table here, in order. With sequences: the pooled vectors of the others, and each
        sequence's `Jagged` by name.
        """
        return super().forward(ids, values_N, weights_N)

    def _given(self, ids: Any, values_N: Tensor | None = None, weights_N: Tensor | None = None) -> SentIds:
        if isinstance(ids, SentIds):
            return super()._given(ids, values_N, weights_N)
        return SentIds(self._inputs.batch(ids, values_N, weights_N), self.sharded)

    # -- checkpoints: keys that no plan changes ------------------------------------------------------------------------

    def own_tensors(self) -> dict[str, Tensor]:
        """Live views of this rank's rows and optimizer state: `NAME.weight`, `NAME.momentum1`; for column shards
        `NAME[0:64].weight`; and of replicated tables, equal on every rank. They load under any plan and any
        replication."""
        tensors_of = self.sharded.storage.tensors
        own = {
            f"{name}.{key}": value for name in self.plan.shards_on(self.rank) for key, value in tensors_of(name).items()
        }
        return own if self.replicas is None else own | dict(self.replicas.named_tensors())

    def get_extra_state(self) -> dict[str, Any]:
        """Plain data that the tensors do not contain."""
        sharded = self.sharded
        state = {"updates": sharded.updates, "table_lr": self.table_lr, "plan": self.plan.to_json()}
        state |= {"rows_once": sharded.rows_once.chosen} if self.features.sequences else {}
        return state | ({"dedup": sharded.dedup.chosen} if self._chooses_dedup else {})

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self.sharded.set_updates(int(state["updates"]))
        self.table_lr = float(state["table_lr"])
        if self._chooses_once:
            self.sharded.rows_once.chosen = state.get("rows_once")
        if self._chooses_dedup:
            self.sharded.dedup.choose(state.get("dedup"))

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
        theirs = {key: value for key, value in saved_here.items() if Shard(key.rsplit(".", 1)[0]).table in known}
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


def _columns_as_given(
    tables: Sequence[TableConfig], output: Sequence[TableConfig], device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Returns for each given column its index in the exchange's output, and the inverse; None if the order is the same.
    The inverse is for backward, because autograd's own would add column by column."""
    names = [table.name for table in output]
    starts = dict(zip(names, itertools.accumulate((t.embedding_dim for t in output), initial=0), strict=False))
    columns = [starts[table.name] + i for table in tables for i in range(table.embedding_dim)]
    if columns == list(range(len(columns))):
        return None
    there = torch.tensor(columns, device=device)
    return there, there.argsort()


def assembled(saved: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor | None:
    """Returns the values of a shard's tensor from saved shards, which may be cut elsewhere; None if some are missing.
    name: the tensor's. like: the live tensor. State kept per row becomes the mean over column parts."""
    if name in saved:
        return saved[name]
    owner, _, tensor = name.rpartition(".")
    wanted, parts = Shard(owner), dict[Shard, Tensor]()
    for key, value in saved.items():
        own, _, of = key.rpartition(".")
        shard = Shard(own)
        if of == tensor and shard & wanted is not None:
            parts[shard] = value
    first, last = wanted.columns or (0, max((shard.columns[1] for shard in parts if shard.columns), default=1))
    found, lacking = torch.zeros_like(like), float(like.numel())
    for shard in sorted(parts, key=lambda shard: shard.columns or (0, 0)):
        common = shard & wanted
        assert common is not None
        into, of_shard = found[common.within(wanted)[: like.dim()]], parts[shard][common.within(shard)[: like.dim()]]
        if into.shape != of_shard.shape:
            return parts[shard]  # of another model; the caller reports its shape
        start, stop = common.columns or (first, last)
        share = (stop - start) / (last - first) if like.dim() == 1 else 1.0
        into.add_(of_shard, alpha=share) if like.dim() == 1 else into.copy_(of_shard)
        lacking -= of_shard.numel() * share
    return found if parts and lacking < 0.5 else None
