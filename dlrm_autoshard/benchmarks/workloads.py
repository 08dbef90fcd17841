"""Workloads on which training speed is compared, and our trainer's job on them.

job = OurJob(W_EMB, plan, rank, W_EMB.batches(rank, world_size))
seconds = job.run(10)                      # ten steps over a few batches in memory, reused in turn
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist

from dlrm_autoshard.config import DenseOptimizerConfig, ExchangeDtypes, ModelConfig, TableOptimizerConfig, TablesConfig
from dlrm_autoshard.config_data import SyntheticData, SyntheticTable
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.sources.synthetic import SyntheticSource
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.id_distribution import LocalIds
from dlrm_autoshard.distributed.lookup.lookups import EmbeddingBags
from dlrm_autoshard.distributed.recorded_passes import passes_over
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.distributed.step import TrainStep
from dlrm_autoshard.model.dlrm import DLRM
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.hardware import hardware_fingerprint
from dlrm_autoshard.probe.shipped_costs import start_warm
from dlrm_autoshard.tables import TableConfig, TableOptimizer, TableStats, measure_table_stats

TABLE_LR, DENSE_LR = 0.02, 0.02


@dataclass(frozen=True)
class Workload:
    """Tables, MLPs and batches. pooling: mean ids a sample, by table. batch_size: over all ranks.

    In W-small large MLPs dominate; W-emb has four times the lookups and small MLPs. Both have 26 tables of dim 64 with
    1e3 to 1e6 rows, Zipf-distributed ids with exponent 1.05, bags of P/2 to 3P/2 ids, row-wise Adagrad on the tables,
    SGD on the dense part, and 2,048 samples a step over all ranks.
    """

    name: str
    rows: tuple[int, ...]
    pooling: tuple[float, ...]
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    num_batches: int
    dim: int = 64
    alpha: float = 1.05
    batch_size: int = 2048
    num_dense: int = 13
    seed: int = 20240
    interaction: Literal["dot", "cat"] = "dot"
    optimizer: TableOptimizer = "rowwise_adagrad"
    dims: tuple[tuple[int, int], ...] = ()
    """(table, dim) where it differs from `dim`."""

    @cached_property
    def tables(self) -> tuple[TableConfig, ...]:
        return tuple(
            TableConfig(f"t_cat_{i}", rows, dict(self.dims).get(i, self.dim)) for i, rows in enumerate(self.rows)
        )

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            dense_arch_layer_sizes=list(self.bottom),
            over_arch_layer_sizes=list(self.top),
            interaction=self.interaction,
        )

    def batches(self, rank: int = 0, world_size: int = 1) -> list[Batch]:
        """Returns a rank's slices of the global batches. Labels are 1 with probability 0.25, whatever the features."""
        size = self.batch_size // world_size
        labels = torch.empty(self.num_batches, self.batch_size)
        labels.bernoulli_(0.25, generator=torch.Generator().manual_seed(self.seed))
        batches = []
        for number in range(self.num_batches):
            first = number * self.batch_size + rank * size
            batch = self._source.read("train", 0, first, first + size)
            own = labels[number, rank * size : (rank + 1) * size].clone()
            batches.append(replace(batch, labels_B=own, global_size=self.batch_size))
        return batches

    def stats(self) -> tuple[TableStats, ...]:
        first = self._source.read("train", 0, 0, self.batch_size)
        return tuple(measure_table_stats(first.lengths_TB.numpy(), first.values_N.numpy()))

    def plan(self, world_size: int) -> ShardingPlan:
        """Returns our planner's plan by the tables' statistics alone, without measuring."""
        task = PlacementTask.build(self.tables, self.stats(), Topology(world_size), batch_size=self.batch_size)
        return Planner("auto").plan(task).plan

    @cached_property
    def _source(self) -> SyntheticSource:
        samples = self.num_batches * self.batch_size
        return drawn(
            self.tables, self.pooling, self.alpha, num_dense=self.num_dense, train_samples=samples, seed=self.seed
        )


def drawn(tables: tuple[TableConfig, ...], pooling: Iterable[float], alpha: float, **data: Any) -> SyntheticSource:
    """Returns a source of samples with these mean ids a sample, by table. data: other keys of the YAML's section."""
    rows = [
        SyntheticTable(name=t.name, num_embeddings=t.num_embeddings, mean_pooling=float(mean), alpha=alpha)
        for t, mean in zip(tables, pooling, strict=True)
    ]
    return SyntheticSource(SyntheticData(source="synthetic", tables=rows, **data), tables)


def warm_planner(algorithm: str = "auto", optimizer: TableOptimizer = "rowwise_adagrad") -> Planner:
    """Returns a planner with the shipped costs, as jobs start."""
    planner = Planner(algorithm, seed=0)
    start_warm(planner, hardware_fingerprint(), optimizer)
    return planner


_ROWS = (
    9120, 6918, 331131, 3981, 36308, 5248, 575440, 436516, 3020, 109648, 12023, 15849, 758578,
    1738, 1000000, 190546, 83176, 144544, 1318, 63096, 251189, 27542, 47863, 1000, 2291, 20893,
)  # fmt: skip
KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Rows of the 26 tables of Criteo's Kaggle data set."""
W_SMALL = Workload(
    "W-small",
    _ROWS,
    (5, 14, 30, 3, 2, 2, 4, 1, 35, 12, 17, 3, 11, 2, 40, 8, 26, 4, 1, 2, 22, 1, 19, 7, 9, 6),
    bottom=(512, 256, 64),
    top=(512, 256, 1),
    num_batches=20,
)
W_EMB = Workload(
    "W-emb",
    _ROWS,
    (20, 57, 119, 11, 8, 7, 15, 5, 138, 49, 66, 13, 42, 10, 160, 32, 103, 17, 4, 6, 89, 5, 77, 27, 37, 23),
    bottom=(64,),
    top=(64, 1),
    num_batches=10,
)


class OurJob:
    """One rank's training step on a workload, without loader, display and records."""

    def __init__(
        self,
        workload: Workload,
        plan: ShardingPlan,
        rank: int,
        batches: list[Batch],
        *,
        overlap: bool = True,
        shared_memory: bool = True,
        exchange_dtype: ExchangeDtypes | None = None,
        ranks: Sequence[int] | None = None,
        device: torch.device = torch.device("cpu"),
        autocast: bool = False,
        location: Literal["device", "managed_caching"] = "device",
        graphs: bool = True,
        replicated: Sequence[str] = (),
        dedup: Sequence[str] = (),
    ) -> None:
        """ranks: those that train, if not all; the others must call `make_groups` meanwhile. autocast: products of
        bf16. location: of the tables. graphs: CUDA graphs of the dense part. replicated: tables on every rank, which
        are not in the plan. dedup: tables that send each id once. On a GPU batches are in pinned memory."""
        self.batches = batches
        group, id_group, control = make_groups(ranks)
        self.embeddings = ShardedEmbeddings(
            workload.tables,
            plan,
            TablesConfig(optimizer=TableOptimizerConfig(name=workload.optimizer, lr=TABLE_LR), location=location),
            rank=rank,
            group=group,
            id_group=id_group,
            device=device,
            shared_memory=shared_memory,
            exchange_dtype=exchange_dtype,
            replicated=replicated,
            dedup=dedup,
        )
        self.clock = StageClock(device, control)
        self.bags = EmbeddingBags(self.embeddings, self.clock, average=False, overlap=overlap)
        self.model = DLRM(workload.num_dense, self.embeddings.output_tables, workload.model, seed=workload.seed)
        self.dense = DataParallelDense(
            self.model,
            DenseOptimizerConfig(name="sgd", lr=DENSE_LR),
            group,
            device,
            average=False,
            shared_memory=shared_memory,
            replicas=self.embeddings.replicas,
        )
        passes = passes_over(self.model, self.bags, autocast=autocast, graphs=graphs)
        self.step = TrainStep(self.model, self.dense, self.bags, passes=passes)
        self._ahead = self.bags.ahead(itertools.cycle(batches), lambda batch: batch)

    @property
    def ids(self) -> LocalIds:
        """Ids of the batch that was trained last."""
        return self._trained.finish()

    def run(self, steps: int, *, sample_every: int = 0) -> float:
        """Returns the seconds that so many steps take. sample_every: steps between sampled ones; 0 samples none."""
        started = time.perf_counter()
        for number in range(steps):
            _, self._trained = next(self._ahead)
            self.step.run(self._trained, 1.0, TABLE_LR, sampled=bool(sample_every) and number % sample_every == 0)
        return time.perf_counter() - started


def make_groups(ranks: Sequence[int] | None = None) -> list[Any]:
    """Returns three groups of these ranks, or of all ranks. Collective over all ranks, members or not."""
    return [dist.new_group(None if ranks is None else list(ranks)) for _ in range(3)]
