"""A trained model, read from a run: to evaluate, to predict with, and of one process to take elsewhere.

with saved_model(Path("runs/mine"), splits=["test"]) as model:
    model.logits("test")                         # [S] logits and [S] labels
export = PlainModel(model)                       # an nn.Module of nn.EmbeddingBags and the dense part
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor, nn

from dlrm_autoshard.autoshard.initial_plan import find_topology
from dlrm_autoshard.config import AutoshardConfig, Config, TableOptimizerConfig, load_config
from dlrm_autoshard.data.batch import DataSource, Split, has_id_weights, label_names_of
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.data.loader import Loader, reader_threads
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.model.dlrm import DenseArch, make_model
from dlrm_autoshard.plan import PlanError, ShardingPlan, Splits, Topology
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.tables import TableConfig, TableStats
from dlrm_autoshard.train.checkpoints.checkpoint import Checkpoints
from dlrm_autoshard.train.evaluation import gathered_logits
from dlrm_autoshard.train.start_record import CONFIG, check_run
from dlrm_autoshard.train.state import Position, TrainingState, in_trained_order, plan_of


@dataclass(frozen=True)
class SavedModel:
    """As after the checkpoint; nothing of the run is written to."""

    runtime: Runtime
    config: Config
    source: DataSource
    embeddings: ShardedEmbeddings
    dense: DenseArch
    position: Position
    labelled: bool

    def logits(self, split: Split) -> tuple[Tensor, Tensor] | None:
        """Logits [S] and labels [S] (of several tasks [S, L]) of the split's samples, in order, on rank 0. A
        collective."""
        if self.source.num_samples(split) == 0:
            raise UserError(f"the data has no samples in split '{split}'.")
        batch_size = self.config.train.eval_batch_size or self.config.train.batch_size
        bf16, data, runtime = self.config.train.dense_dtype == "bf16", self.config.data, self.runtime
        with Loader(
            self.source,
            split,
            0,
            batch_size,
            runtime.rank,
            runtime.world_size,
            prefetch_batches=data.prefetch_batches,
            threads=reader_threads(data.reader_threads, runtime.device, runtime.local_world_size),
            on_bad_id=data.on_bad_id,
            cores=runtime.loader_cores,
            labelled=self.labelled,
        ) as batches:
            return gathered_logits(self.dense, self.embeddings, batches, runtime, autocast=bf16)


@contextmanager
def saved_model(
    run: Path,
    checkpoint: Path | None = None,
    data: Sequence[str] = (),
    *,
    labelled: bool = True,
    splits: Sequence[Split] = (),
    device: Literal["auto", "cpu", "cuda"] | None = None,
) -> Iterator[SavedModel]:
    """checkpoint: the run's newest where none is named. data: `data.key=value`, of data other than the run's. labelled:
    False where they may come without labels. splits: what is read of them. device: the run's where none is named.
    The tables' weights come into memory, without their optimizer's state."""
    for override in data:
        if not override.startswith("data."):
            raise UserError(f"'{override}': the model is as it was trained; only data.key=value can be given.")
    config = config_of(run, data)
    source = open_source(config.data, config.tables, labelled=labelled, splits=splits)
    tables = config.tables.model_copy(update={"optimizer": TableOptimizerConfig(name="sgd")})  # which keeps none
    with Runtime.start(config.run if device is None else config.run.model_copy(update={"device": device})) as runtime:
        checkpoints = Checkpoints(run / "checkpoints", runtime)
        path = runtime.from_rank_0(lambda: checkpoints.asked_for(checkpoint))
        source, columns = in_trained_order(source, config.tables.shared, path)
        features = Features.of(source.tables, config.tables.shared)
        topology = find_topology(AutoshardConfig(), runtime, on_host=tables.location == "managed_caching")
        plan = runtime.from_rank_0(lambda: shared_out(features.tables, topology, plan_of(path, features.tables)))
        embeddings = ShardedEmbeddings(
            features, plan, tables, rank=runtime.rank, group=runtime.group, id_group=runtime.id_group,
            device=runtime.device, initial_values=False,
        )  # fmt: skip
        labels = len(label_names_of(source))
        model = make_model(source.num_dense, embeddings.output_tables, config.model, num_labels=labels)
        dense = DataParallelDense(model, config.dense_optimizer, runtime.group, runtime.device)
        trained_by = config.tables.optimizer.name
        state = TrainingState(runtime, checkpoints, embeddings, dense, columns, None, trained_by=trained_by)
        position = state.resume(path)
        yield SavedModel(runtime, config, source, embeddings, model.eval(), position, labelled)


def config_of(run: Path, overrides: Sequence[str] = ()) -> Config:
    check_run(run)
    return load_config(run / CONFIG, overrides)


def shared_out(tables: Sequence[TableConfig], topology: Topology, trained: ShardingPlan | None) -> ShardingPlan:
    """As they were trained, where that was on as many ranks; else as many bytes on each, and split by columns where one
    fits no rank. UserError where their weights do not fit."""
    splits = Splits(max_parts=topology.world_size, min_dim=4, optimizer="sgd")
    task = PlacementTask.build(tables, [TableStats(1.0)] * len(tables), topology, batch_size=1, splits=splits)
    if trained is not None and trained.world_size == topology.world_size and task.allows(trained):
        return trained
    try:
        return Planner("size_greedy").plan(task).plan
    except PlanError as error:
        what, _, _ = str(error).partition(". ")
        raise UserError(f"{what}. Start more ranks, on machines with more memory in all.") from error


class PlainModel(nn.Module):
    """The same predictions from torch's own modules: probabilities [B] (or [B, L]) = model(dense_BF, values, offsets).

    values, offsets: one tensor a feature, in the order of the data's, as nn.EmbeddingBag takes them; `weights` after
    them where the data's ids have some.
    """

    def __init__(self, saved: SavedModel) -> None:
        super().__init__()
        self.dense = saved.dense.cpu()
        for weight in self.dense.parameters():  # out of the one buffer that ranks reduce: torch exports whole storages
            weight.data = weight.data.clone()
        self.margin = saved.dense.margin
        self.order, self.table_of = saved.embeddings.features.output_order(), saved.embeddings.features.table_of
        self.bags = nn.ModuleList(_bag(table, saved) for table in saved.embeddings.tables)

    def forward(
        self, dense_BF: Tensor, values: list[Tensor], offsets: list[Tensor], weights: list[Tensor] | None = None
    ) -> Tensor:
        pooled = [
            self.bags[table](values[feature], offsets[feature], None if weights is None else weights[feature])
            for feature, table in enumerate(self.table_of)
        ]
        before, after = (dense_BF.new_zeros(dense_BF.shape[0], columns) for columns in self.margin)
        pooled_BD = torch.cat([before, *(pooled[feature] for feature in self.order), after], 1)
        return torch.sigmoid(self.dense.top(self.dense.bottom(dense_BF), pooled_BD))


def _bag(table: TableConfig, saved: SavedModel) -> nn.EmbeddingBag:
    weight = saved.embeddings.storage.tensors(table.name)["weight"].float().cpu().clone()  # of a storage of its own
    return nn.EmbeddingBag.from_pretrained(weight, mode=table.pooling)


def export_plain(saved: SavedModel, file: BinaryIO) -> None:
    """A program that torch.export.load(file).module() runs without this package, for any batch size."""
    model, samples = PlainModel(saved).eval().requires_grad_(False), 3
    features = saved.embeddings.features.features
    dense = torch.zeros(samples, saved.source.num_dense)
    values = [torch.zeros(2 * samples + number, dtype=torch.int64) for number in range(len(features))]
    offsets = [torch.arange(samples) * 2 for _ in features]
    batch = torch.export.Dim("batch", min=2)
    ids = [{0: torch.export.Dim(f"ids_{number}", min=2)} for number in range(len(features))]
    inputs: list[Any] = [dense, values, offsets]
    shapes: list[Any] = [{0: batch}, ids, [{0: batch} for _ in features]]
    if has_id_weights(saved.source):
        inputs.append([torch.ones(len(of_table)) for of_table in values])
        shapes.append(ids)
    with torch.no_grad():
        program = torch.export.export(model, tuple(inputs), dynamic_shapes=tuple(shapes))
    torch.export.save(program, file)
