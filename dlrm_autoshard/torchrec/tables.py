"""Describes TorchRec modules' tables plainly: shapes, pooling, dtypes, features; what can't be moved is refused.

collections = embedding_bags(module)            # {path: EmbeddingBagCollection}, sharded or not
tables = table_configs(collections)             # one TableConfig a table, named as `table_key` says
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
    """A TorchRec model that can't be planned or moved: the message says which table or module, and why."""


def need_torchrec() -> None:
    """Raise TorchrecError that says what to install, where TorchRec can't be imported."""
    try:
        import torchrec  # noqa: F401
    except ImportError as error:
        goes_with_torch = f"1.{int(torch.__version__.split('.')[1]) - 5}.*"  # as fbgemm 1.X does with torch 2.(X+5)
        raise TorchrecError(
            f"torchrec can't be imported ({error}). With torch {torch.__version__}: pip install iopath pyre-extensions "
            f'tensordict tqdm && pip install --no-deps "torchrec=={goes_with_torch}"'
        ) from error


def embedding_bags(module: nn.Module) -> dict[str, Any]:
    """Returns its EmbeddingBagCollections by path, sharded ones or plain ones. What does not pool stays where TorchRec
    has put it beside them; TorchrecError where there are no bags, or where it has no place yet."""
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
            f"module '{path or type(child).__name__}' is an EmbeddingCollection, whose vectors are not pooled; "
            "EmbeddingBagCollections are planned and moved. Look its tables up with ShardedEmbeddingBags(..., "
            "sequences=[...]), which plans and moves them, too, or let TorchRec's own planner place the model."
        )
    if not found:
        raise TorchrecError("the model has no EmbeddingBagCollection, and those are what is planned and moved.")
    return found


def configs_of(collection: Any) -> list[Any]:
    """EmbeddingBagConfigs of a collection's tables, sharded or not, without data-parallel ones: these have no owner."""
    if hasattr(collection, "embedding_bag_configs"):
        return list(collection.embedding_bag_configs())
    copies = data_parallel(collection.module_sharding_plan)
    return [config for config in collection._embedding_bag_configs if config.name not in copies]


def data_parallel(sharding: Mapping[str, Any]) -> dict[str, Any]:
    """Returns TorchRec's ParameterSharding of the tables that every rank holds."""
    return {table: own for table, own in sharding.items() if own.sharding_type == "data_parallel"}


def is_data_parallel(lookup: nn.Module) -> bool:
    """Whether a sharded collection's lookup is that of its data-parallel tables."""
    return isinstance(lookup, DistributedDataParallel)


def table_key(path: str, table: str, collections: Mapping[str, object]) -> str:
    """Returns a table's name in plans and reports: its own, behind its module's path where there are several modules,
    whose tables may be namesakes."""
    return table if len(collections) == 1 else f"{path}.{table}"


def table_configs(collections: Mapping[str, Any]) -> tuple[TableConfig, ...]:
    """All tables of all modules in their order. TorchrecError names a dtype or a pooling that we can't place."""
    tables = []
    for path, collection in collections.items():
        for config in configs_of(collection):
            dtype, pooling = config.data_type.name, config.pooling.name
            if dtype not in _DTYPES:
                raise TorchrecError(
                    f"table '{config.name}' of '{path}' is {dtype}; tables of FP32 and FP16 are handled."
                )
            if pooling not in _POOLING:
                raise TorchrecError(
                    f"table '{config.name}' of '{path}' is pooled by {pooling}; SUM and MEAN are handled."
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
    """As the planner measures them, in one fused lookup: where dtypes or poolings differ, all fp32, all summed.
    TorchRec makes a lookup of each kind; its costs correct the plan once they have been measured in training."""
    kinds = {table.dtype for table in tables}, {table.pooling for table in tables}
    dtype = "fp32" if len(kinds[0]) > 1 else tables[0].dtype
    pooling = "sum" if len(kinds[1]) > 1 else tables[0].pooling
    return tuple(replace(table, dtype=dtype, pooling=pooling) for table in tables)


def optimizer_config(fused_optimizer: Any) -> TablesConfig:
    """fused_optimizer: fbgemm's EmbOptimType, or the name of one."""
    name = str(getattr(fused_optimizer, "name", fused_optimizer))
    if name not in _OPTIMIZERS:
        raise TorchrecError(f"tables are trained with {name}; handled are {', '.join(_OPTIMIZERS)}.")
    return TablesConfig(optimizer=TableOptimizerConfig(name=_OPTIMIZERS[name]))
