"""TorchRec on the same workloads.

    job = TorchrecJob(W_EMB, batches)
    seconds = job.run(10)

TorchRec is no dependency; `find_torchrec` says where it is taken from.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlrm_autoshard.benchmarks.workloads import DENSE_LR, TABLE_LR, Workload
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.tables import TableConfig
from dlrm_autoshard.torchrec.plan_format import to_sharding_plan, torchrec_plan

DIRECTORY = "DLRM_AUTOSHARD_TORCHREC"


def find_torchrec() -> str | None:
    """None where TorchRec can be imported (after this call), else the reason why not.

    Put torchrec (1.9 for torch 2.14, 1.8 for 2.13) into a directory of its own, named in DLRM_AUTOSHARD_TORCHREC:

        pip install --no-deps --target DIR "torchrec==1.9.*" tensordict iopath pyre-extensions portalocker orjson
            cloudpickle pyvers typing_inspect mypy_extensions
        DLRM_AUTOSHARD_TORCHREC=DIR dlrm-autoshard bench train-wemb
    """
    extra = os.environ.get(DIRECTORY)
    if extra and extra not in sys.path:
        sys.path.append(extra)
    if importlib.util.find_spec("torchrec") is None:
        return f"torchrec is not installed; {DIRECTORY} may name a directory that has it (see peer_torchrec.py)"
    return None


def embedding_bags(tables: Sequence[TableConfig]) -> Any:
    """Returns TorchRec's module of these tables, which gets memory when it is sharded."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    configs = [
        EmbeddingBagConfig(
            name=t.name, embedding_dim=t.embedding_dim, num_embeddings=t.num_embeddings, feature_names=[t.name]
        )
        for t in tables
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


def its_planner(
    tables: Sequence[TableConfig],
    pooling: Sequence[float],
    batch_size: int,
    *,
    world_size: int,
    device: str,
    local_world_size: int | None = None,
) -> Any:
    """Returns TorchRec's planner for whole tables with fused kernels, given each table's mean pooling.

    batch_size: of a rank. local_world_size: ranks of a host; None for all.
    """
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingType

    return EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=local_world_size, compute_device=device),
        batch_size=batch_size,
        constraints={
            table.name: ParameterConstraints(
                sharding_types=[ShardingType.TABLE_WISE.value],
                compute_kernels=["fused"],
                pooling_factors=[float(mean)],
            )
            for table, mean in zip(tables, pooling, strict=True)
        },
    )


def its_placement(task: PlacementTask) -> list[int]:
    """Returns each table's rank by TorchRec's planner for GPUs; needs no ranks."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    hosts = task.topology.hosts or (0,) * task.world_size
    planner = its_planner(
        task.tables,
        [stat.mean_pooling for stat in task.stats],
        task.batch_size // task.world_size,
        world_size=task.world_size,
        device="cuda",
        local_world_size=hosts.count(0),
    )
    module = nn.ModuleDict({"tables": embedding_bags(task.tables)})
    placed = planner.plan(module, [EmbeddingBagCollectionSharder()]).plan["tables"]
    return [int(placed[name].ranks[0]) for name in task.names]


def sharded(
    model: nn.Module,
    tables: Sequence[TableConfig],
    pooling: Sequence[float],
    batch_size: int,
    *,
    module: str,
    plan: Any,
    check_ids: bool,
    device: torch.device = torch.device("cpu"),
) -> tuple[Any, Any]:
    """Returns the sharded model and TorchRec's plan of it. Collective.

    batch_size: of a rank. module: the name of the tables' module in the model. plan: ours or TorchRec's; None for that
    of TorchRec's planner.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel

    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": TABLE_LR, "eps": 1e-8}
    sharder = EmbeddingBagCollectionSharder(
        fused_params=fused if check_ids else fused | {"bounds_check_mode": BoundsCheckMode.NONE}
    )
    if plan is None:
        planner = its_planner(tables, pooling, batch_size, world_size=dist.get_world_size(), device=device.type)
        world = dist.group.WORLD
        assert world is not None
        its_plan = planner.collective_plan(model, [sharder], world)
    elif isinstance(plan, ShardingPlan):
        its_plan = to_sharding_plan(torchrec_plan(plan, tables, module))
    else:
        its_plan = plan
    parallel = DistributedModelParallel(
        model,
        device=device,
        plan=its_plan,
        sharders=[sharder],
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=True),
    )
    return parallel, its_plan


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that no fused optimizer updates."""
    return [parameter for name, parameter in model.named_parameters() if "embedding_bags" not in name]


class TorchrecJob:
    """One rank's TorchRec trainer on a workload, over its own slices of the batches. Collective.

    It has TorchRec's DLRM, planner (table-wise, fused kernels, given each table's mean pooling) and row-wise Adagrad,
    SGD on the dense part, DDP with a static graph, and int32 ids.
    """

    def __init__(
        self,
        workload: Workload,
        batches: list[Batch],
        *,
        plan: ShardingPlan | None = None,
        check_ids: bool = True,
        pipeline: bool = False,
        device: torch.device = torch.device("cpu"),
    ) -> None:
        """plan: None for that of TorchRec's planner. check_ids: with fbgemm's check of ids in each lookup, as TorchRec
        comes; our loader does that beside the step. pipeline: with TrainPipelineSparseDist, which on a CPU only starts
        the next batch's exchange earlier. On a GPU batches are in pinned memory."""
        reason = find_torchrec()
        if reason is not None:
            raise ModuleNotFoundError(reason)
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
        from torchrec.models.dlrm import DLRM, DLRMTrain
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        from torchrec.streamable import Pipelineable

        Pipelineable.register(_Batch)
        model = DLRMTrain(
            DLRM(
                embedding_bag_collection=embedding_bags(workload.tables),
                dense_in_features=workload.num_dense,
                dense_arch_layer_sizes=list(workload.bottom),
                over_arch_layer_sizes=list(workload.top),
                dense_device=device,
            )
        )
        self.model, _ = sharded(
            model,
            workload.tables,
            workload.pooling,
            workload.batch_size // dist.get_world_size(),
            module="model.sparse_arch.embedding_bag_collection",
            plan=plan,
            check_ids=check_ids,
            device=device,
        )
        self.optimizer = torch.optim.SGD(dense_parameters(self.model), lr=DENSE_LR)
        keys = [table.name for table in workload.tables]
        # A jagged tensor remembers its offsets, so each step gets a new one, as from a real loader.
        self._fresh_batches = (
            _Batch(b.dense_BF, KeyedJaggedTensor(keys, b.values_N, lengths=b.lengths_TB.flatten()), b.labels_B)
            for b in itertools.cycle(batches)
        )
        self._pipeline = TrainPipelineSparseDist(self.model, self.optimizer, device) if pipeline else None
        self._device = device

    def run(self, steps: int) -> float:
        """Returns the seconds that so many steps take."""
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - started

    def step(self) -> torch.Tensor:
        if self._pipeline is not None:
            self._pipeline.progress(self._fresh_batches)
            return torch.zeros(())
        self.optimizer.zero_grad()
        loss, _ = self.model(next(self._fresh_batches).to(self._device, non_blocking=True))
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class _Batch:
    """A batch in the form that DLRMTrain takes."""

    def __init__(self, dense_features: torch.Tensor, sparse_features: Any, labels: torch.Tensor) -> None:
        self.dense_features, self.sparse_features, self.labels = dense_features, sparse_features, labels

    def to(self, device: torch.device, non_blocking: bool = False) -> _Batch:
        if device.type == "cpu":
            return self
        parts = self.dense_features, self.sparse_features, self.labels
        return _Batch(*(part.to(device, non_blocking=non_blocking) for part in parts))

    def record_stream(self, stream: Any) -> None:
        if self.labels.is_cuda:
            for part in (self.dense_features, self.sparse_features, self.labels):
                part.record_stream(stream)
