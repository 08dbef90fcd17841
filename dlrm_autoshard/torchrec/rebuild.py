"""Builds a sharded EmbeddingBagCollection for another plan beside the live one, and swaps them.

fresh = rebuilt(collection, sharding)           # without rows; shards.local_shards(fresh) are where they go
undo = put_in_place(collection, fresh)          # the live object now uses the tables of `fresh`, until undo()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dlrm_autoshard.torchrec.tables import configs_of, data_parallel, is_data_parallel

_KEPT = {"training", "is_pipelined", "_optim", "post_lookup_tracker_fn", "post_odist_tracker_fn"}
"""Attributes of the live module that others hold or have set; its hooks are kept as well."""


def rebuilt(collection: Any, sharding: Mapping[str, Any]) -> Any:
    """Builds the collection anew. sharding: TorchRec's ParameterSharding of each table that has owners.

    Everything else is the live collection's, including the lookup of data-parallel tables with its weights and
    DistributedDataParallel. Leaves the random generators unchanged."""
    from torchrec import EmbeddingBagCollection
    from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
    from torchrec.distributed.types import EmbeddingModuleShardingPlan

    plain = EmbeddingBagCollection(
        tables=collection._embedding_bag_configs, is_weighted=collection._is_weighted, device="meta"
    )
    for infos in collection.sharding_type_to_sharding_infos.values():
        for info in infos:  # fused parameters as merged from the sharder and the table
            parameter = plain.embedding_bags[info.embedding_config.name].weight
            parameter._optimizer_kwargs = [dict(info.fused_params)]

    class Rebuilt(type(collection)):  # type: ignore[misc]
        def init_data_parallel(self) -> None:
            """Uses the live lookup where TorchRec would wrap a new one, before weights are registered."""
            live = next((lookup for lookup in collection._lookups if is_data_parallel(lookup)), None)
            for number, sharding in enumerate(self._embedding_shardings):
                if isinstance(sharding, DpPooledEmbeddingSharding):
                    self._lookups[number] = live

        def reset_parameters(self) -> None:
            """Keeps weights: live ones are among them, and all others are about to arrive."""

    with torch.random.fork_rng([] if collection._device.type == "cpu" else [collection._device]):
        fresh = Rebuilt(
            module=plain,
            table_name_to_parameter_sharding=EmbeddingModuleShardingPlan(
                {**sharding, **data_parallel(collection.module_sharding_plan)}
            ),
            env=collection._env,
            fused_params=None,
            device=collection._device,
            qcomm_codecs_registry=collection.qcomm_codecs_registry,
            module_fqn=collection._module_fqn,
            sharded_module_order_overwrite=collection._sharded_module_order_overwrite,
        )
    fresh.train(collection.training)
    return fresh


def put_in_place(live: Any, fresh: Any) -> Callable[[], None]:
    """Gives the live module and its fused optimizer the fresh one's tables, for all who hold them. Returns the way
    back."""
    old, old_optimizers = _inside(live), list(live._optim._optims)

    def become(inside: Mapping[str, Any], optimizers: list[Any]) -> None:
        for name in _inside(live):
            del vars(live)[name]
        vars(live).update(inside)
        live._optim._optims[:] = optimizers

    become(_inside(fresh), fresh._optim._optims)
    return lambda: become(old, old_optimizers)


def table_parameters(collection: Any) -> dict[str, nn.Parameter]:
    """Returns the weights of a collection's tables by name, without data-parallel tables."""
    return {config.name: collection.embedding_bags[config.name].weight for config in configs_of(collection)}


def _inside(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _KEPT and "_hook" not in name}
