"""Reads a trained model from a run, to evaluate it and predict with it.

with saved_model(Path("runs/mine"), splits=["test"]) as model:
    model.logits("test")                         # logits [S] and labels [S]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from dlrm_autoshard import plug_in
from dlrm_autoshard.autoshard.initial_plan import find_topology
from dlrm_autoshard.config import AutoshardConfig, Config, TableOptimizerConfig, load_config
from dlrm_autoshard.data.batch import Split
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.lookups import EmbeddingBags
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.progress import tracked
from dlrm_autoshard.model.dlrm import DenseArch, make_model
from dlrm_autoshard.plan import PlanError, ShardingPlan, Splits, Topology
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.tables import TableConfig, TableStats
from dlrm_autoshard.training.checkpoints.folder import CheckpointFolder
from dlrm_autoshard.training.checkpoints.saved_weights import SavedWeights
from dlrm_autoshard.training.data import TrainingData
from dlrm_autoshard.training.evaluation import gathered_logits
from dlrm_autoshard.training.run_directory import CONFIG, check_run
from dlrm_autoshard.training.state import plan_of


@dataclass(frozen=True)
class SavedModel:
    """The model as of a checkpoint. Nothing is written to the run."""

    runtime: Runtime
    config: Config
    data: TrainingData
    bags: EmbeddingBags
    dense: DenseArch
    step: int

    def logits(self, split: Split, *, quiet: bool = False) -> tuple[Tensor, Tensor] | None:
        """Returns logits [S] and labels [S] ([S, L] for L tasks) of the split's samples in order, on rank 0. A
        collective. quiet: show no progress."""
        if self.data.source.num_samples(split) == 0:
            raise UserError(f"the data has no samples in split '{split}'.")
        with self.data.batches(split, epoch=0) as batches:
            shown = tracked(batches, len(batches), f"batches of {split}", quiet=quiet or self.runtime.rank > 0)
            bf16 = self.config.train.dense_dtype == "bf16"
            return gathered_logits(self.dense, self.bags, shown, self.runtime, autocast=bf16)


@contextmanager
def saved_model(
    run: Path,
    checkpoint: Path | None = None,
    data: Sequence[str] = (),
    *,
    labelled: bool = True,
    splits: Sequence[Split] = (),
    device: Literal["auto", "cpu", "cuda"] | None = None,
    trust: bool = False,
) -> Iterator[SavedModel]:
    """Yields a run's model; loads the tables' weights without optimizer state.

    checkpoint: default the newest. data: overrides `data.key=value` for other data. labelled: False if the data may
    lack labels. splits: those that will be read. device: default the run's. trust: as in `config_of`."""
    for override in data:
        if not override.startswith("data."):
            raise UserError(f"'{override}': the model stays as it was trained; only data.key=value can be given.")
    config = config_of(run, data, trust=trust)
    source = open_source(config.data, config.tables, labelled=labelled, splits=splits)
    tables = config.tables.model_copy(update={"optimizer": TableOptimizerConfig(name="sgd")})  # has no state
    with Runtime.start(config.run if device is None else config.run.model_copy(update={"device": device})) as runtime:
        path = runtime.from_rank_0(lambda: CheckpointFolder(run / "checkpoints").asked_for(checkpoint))
        loaded = TrainingData(source, config, runtime, path, labelled=labelled)
        source = loaded.source
        plain = [replace(table, optimizer=None) for table in source.tables]
        features = Features.of(plain, config.tables.shared, config.tables.sequences)
        topology = find_topology(AutoshardConfig(), runtime, on_host=tables.location == "managed_caching")
        plan = runtime.from_rank_0(lambda: shared_out(features.tables, topology, plan_of(path, features.tables)))
        embeddings = ShardedEmbeddings(
            features, plan, tables, rank=runtime.rank, group=runtime.group, id_group=runtime.id_group,
            device=runtime.device, initial_values=False,
        )  # fmt: skip
        labels, outputs = len(loaded.label_names), embeddings.output_tables
        model = make_model(source.num_dense, outputs, config.model, 0, labels, features.by_sequence).to(runtime.device)
        own = plan.shards_on(runtime.rank)
        shards = {str(shard): embeddings.storage.tensors(shard)["weight"] for shard in own}
        weights = runtime.on_all_ranks(lambda: SavedWeights.open(path, features.tables))
        runtime.on_all_ranks(lambda: weights.load(model, shards))
        embeddings.storage.overwritten()
        bags = EmbeddingBags(embeddings, StageClock(runtime.device, runtime.clock_group), average=False)
        yield SavedModel(runtime, config, loaded, bags, model.eval(), weights.step)


def config_of(run: Path, overrides: Sequence[str] = (), *, trust: bool = False) -> Config:
    """Returns a run's settings. UserError if they name Python files in the run itself, which readers may never have
    seen, unless `trust` is given."""
    check_run(run)
    config = load_config(run / CONFIG, overrides)
    places = {"data.factory": getattr(config.data, "factory", None), "model.factory": config.model.factory}
    for key, place in places.items():
        if place is not None and not trust and plug_in.lies_in(place, run):
            raise UserError(
                f"{run / CONFIG}: {key} is '{place}', Python in the run's own directory that would be run. Read it; if "
                "you trust it, add --trust."
            )
    return config


def shared_out(tables: Sequence[TableConfig], topology: Topology, trained: ShardingPlan | None) -> ShardingPlan:
    """Returns the plan of training if it fits these ranks, else one with equal bytes per rank, which splits tables that
    fit no rank. UserError if the weights do not fit."""
    splits = Splits(max_parts=topology.world_size, min_dim=4, optimizer="sgd", rows=True)
    task = PlacementTask.build(tables, [TableStats(1.0)] * len(tables), topology, batch_size=1, splits=splits)
    same = trained is not None and {*trained.tables} == {*task.names}  # no table was replicated
    if same and trained is not None and trained.world_size == topology.world_size and task.allows(trained):
        return trained
    try:
        return Planner("size_greedy").plan(task).plan
    except PlanError as error:
        what, _, _ = str(error).partition(". ")
        raise UserError(f"{what}. Start more ranks, on machines with more memory in total.") from error
