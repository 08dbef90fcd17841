"""Describes the tables of TorchRec modules: shapes, pooling, dtypes, features; refuses what cannot be moved.

collections = embedding_bags(module)            # {path: EmbeddingBagCollection}, sharded or not
tables = table_configs(collections)             # a TableConfig per table, named by `table_key`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrm_autoshard.config import TableOptimizerConfig, TablesConfig
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.optimizers import OPTIMIZERS
from dlrm_autoshard.tables import Pooling, TableConfig, TableDtype, TableOptimizer

_OPTIMIZERS: dict[str, TableOptimizer] = {record.fbgemm: name for name, record in OPTIMIZERS.items()}
_DTYPES: dict[str, TableDtype] = {"FP32": "fp32", "FP16": "fp16"}
_POOLING: dict[str, Pooling] = {"SUM": "sum", "MEAN": "mean"}


class TorchrecError(UserError):
    """A TorchRec model cannot be planned or moved; the message says which table or module, and why."""


def need_torchrec() -> None:
    """Raises TorchrecError with the install command if TorchRec cannot be imported."""
    try:
        import torchrec  # noqa: F401
    except ImportError as error:
        goes_with_torch = f"1.{int(torch.__version__.split('.')[1]) - 5}.*"  # like fbgemm: 1.X with torch 2.(X+5)
        raise TorchrecError(
            f"torchrec can't be imported ({error}). With torch {torch.__version__}: pip install iopath pyre-extensions "
            f'tensordict tqdm && pip install --no-deps "torchrec=={goes_with_torch}"'
        ) from error


def embedding_bags(module: nn.Module) -> dict[str, Any]:
    """Returns the EmbeddingBagCollections by path, sharded or plain. EmbeddingCollections beside them must be sharded
    already, and stay; TorchrecError otherwise, or if there are no bags."""
    need_torchrec()
    from torchrec import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    modules = dict(module.named_modules())
    wanted = (EmbeddingBagCollection, ShardedEmbeddingBagCollection)
    found = {path: child for path, child in modules.items() if type(child) in wanted}
    unpooled = {p: c for p, c in modules.items() if isinstance(c, (EmbeddingCollection, ShardedEmbeddingCollection))}
    placed = all(isinstance(child, ShardedEmbeddingCollection) for child in unpooled.values())
    if unpooled and not (found and placed):
        path, child = next(iter(unpooled.items()))
        raise TorchrecError(
            f"module '{path or type(child).__name__}' is an EmbeddingCollection, whose vectors are not pooled; only "
            "EmbeddingBagCollections are planned and moved. Use ShardedEmbeddingBags(..., sequences=[...]), which "
            "plans and moves its tables, too, or let TorchRec's own planner place the model."
        )
    if not found:
        raise TorchrecError(
            "the model has no EmbeddingBagCollection, the only module whose tables are planned and moved."
        )
    return found


def configs_of(collection: Any) -> list[Any]:
    """Returns the EmbeddingBagConfigs of tables with owners, without data-parallel ones; sharded or not."""
    if hasattr(collection, "embedding_bag_configs"):
        return list(collection.embedding_bag_configs())
    copies = data_parallel(collection.module_sharding_plan)
    return [config for config in collection._embedding_bag_configs if config.name not in copies]


def data_parallel(sharding: Mapping[str, Any]) -> dict[str, Any]:
    """Returns TorchRec's ParameterSharding of the tables that every rank holds."""
    return {table: own for table, own in sharding.items() if own.sharding_type == "data_parallel"}


def is_data_parallel(lookup: nn.Module) -> bool:
    """Returns whether a sharded collection's lookup is that of its data-parallel tables."""
    return isinstance(lookup, DistributedDataParallel)


def table_key(path: str, table: str, collections: Mapping[str, object]) -> str:
    """Returns a table's name in plans and reports: its own, with its module's path in front if there are several
    modules."""
    return table if len(collections) == 1 else f"{path}.{table}"


def table_configs(collections: Mapping[str, Any]) -> tuple[TableConfig, ...]:
    """Returns all tables of all modules in order. TorchrecError names an unsupported dtype or pooling."""
    tables = []
    for path, collection in collections.items():
        for config in configs_of(collection):
            dtype, pooling = config.data_type.name, config.pooling.name
            if dtype not in _DTYPES:
                raise TorchrecError(f"table '{config.name}' of '{path}' is {dtype}; only FP32 and FP16 are supported.")
            if pooling not in _POOLING:
                raise TorchrecError(
                    f"table '{config.name}' of '{path}' is pooled by {pooling}; only SUM and MEAN are supported."
                )
            tables.append(
                TableConfig(
                    table_key(path, config.name, collections),
                    config.num_embeddings,
                    config.embedding_dim,
                    _POOLING[pooling],
                    _DTYPES[dtype],
                )
            )
    return tuple(tables)


def alike(tables: Sequence[TableConfig]) -> tuple[TableConfig, ...]:
    """Returns the tables as the planner measures them, in one fused lookup: if dtypes or poolings differ, all fp32, all
    summed. TorchRec makes a lookup of each kind; measurements in training then correct the costs."""
    kinds = {table.dtype for table in tables}, {table.pooling for table in tables}
    dtype = "fp32" if len(kinds[0]) > 1 else tables[0].dtype
    pooling = "sum" if len(kinds[1]) > 1 else tables[0].pooling
    return tuple(replace(table, dtype=dtype, pooling=pooling) for table in tables)


def optimizer_config(fused_optimizer: Any) -> TablesConfig:
    """Returns the config of fbgemm's optimizer. fused_optimizer: an EmbOptimType, or its name."""
    name = str(getattr(fused_optimizer, "name", fused_optimizer))
    if name not in _OPTIMIZERS:
        raise TorchrecError(f"tables are trained with {name}; supported are {', '.join(_OPTIMIZERS)}.")
    return TablesConfig(optimizer=TableOptimizerConfig(name=_OPTIMIZERS[name]))
