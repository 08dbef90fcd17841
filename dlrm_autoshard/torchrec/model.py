"""A DistributedModelParallel whose tables can move: its modules, tables, ranks and live plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.distributed.ranks.agreement import agree, facts_of
from dlrm_autoshard.distributed.ranks.runtime import runtime_of
from dlrm_autoshard.plan import ShardingPlan, shard_tables
from dlrm_autoshard.tables import TableConfig
from dlrm_autoshard.torchrec.plan_format import check_no_rows
from dlrm_autoshard.torchrec.sharding import plan_of
from dlrm_autoshard.torchrec.tables import (
    TorchrecError,
    alike,
    configs_of,
    embedding_bags,
    optimizer_config,
    table_configs,
    table_key,
)


class ShardedModel:
    """Implements `movable.PlacedTables`. tables: as the planner measures them; model_tables: as they are."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        """TorchrecError says what prevents tables from being moved. Collective."""
        self.model, self.optimizer = model, optimizer
        self.collections = embedding_bags(model.module)
        self.environment = _check(self.collections)
        self.model_tables = table_configs(self.collections)
        if not self.model_tables:
            raise TorchrecError(
                "all tables of the model are data-parallel: every rank holds them, and none can be moved. "
                "`dlrm_autoshard.torchrec.plan` makes a plan whose tables have owners."
            )
        self.tables: tuple[TableConfig, ...] = alike(self.model_tables)
        self.replicated: tuple[TableConfig, ...] = ()
        self.runtime = runtime_of(self.environment.process_group, model.device)
        self.device: torch.device = self.runtime.device
        self.plan: ShardingPlan = plan_of(model.plan, self.collections, self.runtime.world_size)
        self.config: TablesConfig = optimizer_config(_fused_optimizer(self.collections))
        facts = facts_of(self.model_tables, self.plan)
        agree(self.runtime, facts | {"the tables' optimizer": self.config.optimizer.name, "device": self.device.type})
        self.check_splits(self.plan)
        self.last_features: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        """Arguments of each module's last call, by the module's path."""

    def check_splits(self, plan: ShardingPlan) -> None:
        """Raises TorchrecError if a move could not keep the optimizer state of a split table."""
        check_no_rows(plan)
        if plan.split_tables and not self.config.optimizer.splits_tables:
            raise TorchrecError(
                f"table '{plan.split_tables[0]}' is split by columns under row-wise Adagrad, which keeps a sum of "
                "squares per row of each shard: a move that joins or splits shards would change the training. Tables "
                "under row-wise Adagrad are moved whole; under SGD, Adagrad and Adam also split."
            )

    @property
    def local_shards(self) -> tuple[TableConfig, ...]:
        return tuple(
            shard
            for shard in shard_tables(self.tables, self.plan)
            if self.plan.rank_of[shard.name] == self.runtime.rank
        )

    @property
    def local_lookups(self) -> tuple[TableConfig, ...]:
        counts = {
            table_key(path, config.name, self.collections): len(config.feature_names)
            for path, collection in self.collections.items()
            for config in configs_of(collection)
        }
        return tuple(s for s in self.local_shards for _ in range(counts[s.shard.table]))


PIPELINED = (
    "module '{}' is in a train pipeline, which has already sent the next batch's ids to the tables' owners: after a "
    "move they would look up wrong rows. Train with model(batch), loss.backward(), optimizer.step()."
)


def _check(collections: Mapping[str, Any]) -> Any:
    """Returns the environment of the ranks that share the tables. TorchrecError if tables could not be moved."""
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
    from torchrec.distributed.types import ShardingEnv

    for path, collection in collections.items():
        if type(collection) is not ShardedEmbeddingBagCollection:
            raise TorchrecError(f"module '{path}' is not sharded: give Autoshard the DistributedModelParallel.")
        if type(collection._env) is not ShardingEnv or collection._env.process_group is None:
            raise TorchrecError(
                f"module '{path}' is sharded in two dimensions; only tables of one group of ranks are moved."
            )
        if collection.is_pipelined:
            raise TorchrecError(PIPELINED.format(path))
    return next(iter(collections.values()))._env


def _fused_optimizer(collections: Mapping[str, Any]) -> Any:
    """Returns fbgemm's type of the optimizer that all tables have."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    found = {
        info.fused_params.get("optimizer", EmbOptimType.EXACT_SGD): info.embedding_config.name
        for collection in collections.values()
        for kind, infos in collection.sharding_type_to_sharding_infos.items()
        for info in infos
        if kind != "data_parallel"
    }
    if len(found) > 1:
        said = ", ".join(f"'{table}' with {optimizer.name}" for optimizer, table in found.items())
        raise TorchrecError(f"tables are trained with several optimizers ({said}); only one is supported.")
    return next(iter(found))
