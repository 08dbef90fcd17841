"""The state that a job needs to continue as if it had never stopped: saves, loads and checks it.

state = TrainingState(...); state.save(position)             # at an epoch's end, or every so many steps
position = state.resume(checkpoint)                          # weights, both optimizers, planner and resharding in place
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.autoshard.intervals import Intervals
from dlrm_autoshard.data.batch import DataSource
from dlrm_autoshard.data.columns import Columns, in_order
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.json_file import FormatError, checked
from dlrm_autoshard.plan import PlanError, ShardingPlan
from dlrm_autoshard.tables import TableConfig
from dlrm_autoshard.training.checkpoints.checkpoint import Checkpoints
from dlrm_autoshard.training.checkpoints.folder import step_of
from dlrm_autoshard.training.checkpoints.manifest import (
    EXTRA,
    CheckpointError,
    DamagedCheckpoint,
    SavedState,
    check_same,
    read_manifest,
)
from dlrm_autoshard.training.random_state import check_random_state, random_state, restore_random_state
from dlrm_autoshard.training.selection import Selection


class TrainError(UserError):
    """Training cannot go on; the message says at which step, on which rank, and what to try."""


class ExtraRecord(TypedDict):
    """extra.json, without the entries of `Intervals.state_dict`."""

    random: list[dict[str, Any]]
    selection: NotRequired[dict[str, dict[str, Any]]]


@dataclass
class Position:
    """How far training has come: the next step is step `step` and starts at `sample` of `epoch`."""

    epoch: int = 0
    sample: int = 0
    step: int = 0

    def advance(self, samples: int, epoch_samples: int) -> None:
        """Counts a step of so many samples; starts the next epoch after the last."""
        self.step, self.sample = self.step + 1, self.sample + samples
        if self.sample >= epoch_samples:
            self.epoch, self.sample = self.epoch + 1, 0

    @property
    def epochs_done(self) -> int:
        """Number of the current epoch, or of the one that just ended."""
        return self.epoch - (self.sample == 0 and self.epoch > 0)


@dataclass
class TrainingState:
    """A job's state; every method is a collective. columns: of the data, in the model's order."""

    runtime: Runtime
    checkpoints: Checkpoints
    embeddings: ShardedEmbeddings
    dense: DataParallelDense
    columns: Columns
    intervals: Intervals
    selection: Selection

    def __post_init__(self) -> None:
        """Finds buffers and frozen weights that hold infinities from the start, as attention masks do."""
        self._masks = {name for name, value in self.dense.untrained() if not all_finite(value)}

    def save(self, position: Position) -> None:
        self.compare_copies(position.step)  # so that only good weights are saved
        self.dense.broadcast_buffers()  # so that all ranks continue with what is saved
        self._check_weights(position)
        state = SavedState(
            step=position.step,
            epoch=position.epoch,
            sample=position.sample,
            plan=self.embeddings.plan.to_json(),
            replicated=self._replicated,
            dedup=[*(self.embeddings.dedup.chosen or ())],
            columns=self.columns,
            table_updates=self.embeddings.updates,
            optimizer_steps=self.dense.optimizer_steps,
        )
        extra: dict[str, Any] = {
            "random": self.runtime.gather(random_state(self.runtime.device)),
            "selection": self.selection.state_dict(),
            **self.intervals.state_dict(),
        }
        elsewhere = {} if self.runtime.rank == 0 else self._on_every_rank()
        own = {name: value for name, value in self.tensors().items() if name not in elsewhere}
        self.checkpoints.save(own, state, extra)

    def load_weights(self, checkpoint: Path) -> tuple[SavedState, Any]:
        """Loads the model and its optimizers only; returns the rest of the checkpoint."""
        state, extra = self.checkpoints.load(checkpoint, self.tensors(), self._shapes(), self.columns)
        self.embeddings.storage.overwritten()
        self.embeddings.set_updates(state.table_updates)
        self.dense.set_optimizer_steps(state.optimizer_steps)
        return state, extra

    def resume(self, checkpoint: Path) -> Position:
        state, extra = self.load_weights(checkpoint)
        best = self.runtime.broadcast(self.checkpoints.best())
        self.runtime.on_all_ranks(lambda: self._remember(checkpoint, state, extra, best))
        return Position(state.epoch, state.sample, state.step)

    def _remember(self, checkpoint: Path, saved: SavedState, extra: Any, best: Path | None) -> None:
        """Restores what a checkpoint holds beside tensors. DamagedCheckpoint if no job writes such a state."""
        learned = {*saved.replicated} == {*self._replicated}  # else it is about other tables than are placed now
        try:
            record = checked(ExtraRecord, extra, extra="ignore")
            for state in record["random"]:
                check_random_state(state)
            if learned:
                self.intervals.load_state_dict(extra)
            self.selection.load_state_dict(record.get("selection", {}), None if best is None else step_of(best))
            if self.runtime.rank < len(record["random"]):
                restore_random_state(record["random"][self.runtime.rank], self.runtime.device)
        except (FormatError, PlanError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            if isinstance(error, UserError) and not isinstance(error, FormatError | PlanError):
                raise  # not about the checkpoint: a records file, for example
            said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            raise DamagedCheckpoint(
                f"checkpoint file '{checkpoint / EXTRA}' holds what no job of this version writes: {said[:500]}"
            ) from error

    def compare_copies(self, steps_done: int) -> None:
        """Raises TrainError if data-parallel weights differ between ranks, bit by bit."""
        fingerprints = self.runtime.all_gather(self.dense.fingerprint())
        other = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
        if other:
            copies = "" if self.embeddings.replicas is None else ", or copies of tables,"
            raise TrainError(
                f"the dense weights{copies} of rank(s) {', '.join(map(str, other))} differ from rank 0's after step "
                f"{steps_done - 1}: a rank's memory or arithmetic is at fault, or the model's code changes them on one "
                f"rank only. {self.last_checkpoint(steps_done)}"
            )

    def last_good(self, before: int) -> str:
        """Returns sentences: the newest checkpoint of a step below `before`, and what to try."""
        return (
            f"{self.last_checkpoint(before)} "
            "Lower the learning rates, warm up longer, or check the data; train.on_nan: skip skips such batches."
        )

    def last_checkpoint(self, before: int) -> str:
        with contextlib.suppress(CheckpointError):
            self.checkpoints.finish()
        return f"Last good checkpoint: {self.checkpoints.latest(before) or 'none'}."

    def tensors(self) -> dict[str, Tensor]:
        """Returns everything that this rank saves and loads; shards under their own names."""
        own = {
            f"tables.{name}.{key}": value
            for name in self.embeddings.plan.shards_on(self.runtime.rank)
            for key, value in self.embeddings.storage.tensors(name).items()
        }
        return own | self._on_every_rank()

    def _on_every_rank(self) -> dict[str, Tensor]:
        replicas = self.embeddings.replicas
        copies = {} if replicas is None else {f"tables.{name}": value for name, value in replicas.named_tensors()}
        return copies | dict(self.dense.named_tensors())

    @property
    def _replicated(self) -> list[str]:
        replicas = self.embeddings.replicas
        return [] if replicas is None else [table.name for table in replicas.tables]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns shapes of all tensors of the model, whoever owns them."""
        shapes = {name: tuple(value.shape) for name, value in self.dense.named_tensors()}
        for table in self.embeddings.features.tables:
            shapes[f"tables.{table.name}.weight"] = (table.num_embeddings, table.embedding_dim)
            for state, shape in table.state_shapes(self.embeddings.config.optimizer.name).items():
                shapes[f"tables.{table.name}.{state}"] = shape
        return shapes

    def _check_weights(self, position: Position) -> None:
        """Raises TrainError if weights are not finite: their checkpoint would be useless and push out a good one."""
        tensors = self.tensors().items()
        bad = next((name for name, value in tensors if not (name in self._masks or all_finite(value))), None)
        for rank, name in enumerate(self.runtime.all_gather(bad)):
            if name is not None:
                when = f"after step {position.step - 1}" if position.step else "before the first step"
                raise TrainError(
                    f"'{name}' holds NaN or infinity {when}, on rank {rank}. {self.last_good(position.step)}"
                )


def all_finite(tensor: Tensor) -> bool:
    """Returns whether all values are finite, without a copy of the tensor's size."""
    return not tensor.numel() or all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor.detach()))


def in_trained_order(
    source: DataSource, shared: Mapping[str, Sequence[str]], checkpoint: Path | None
) -> tuple[DataSource, Columns]:
    """Returns the source with columns in the order of the checkpoint's model, and that order; without a checkpoint the
    source as it is."""
    wanted = None if checkpoint is None else read_manifest(checkpoint).state.columns
    if wanted is not None:
        source = in_order(source, wanted, shared, f"checkpoint '{checkpoint}'")
    return source, Columns.of(source, shared)


def plan_of(checkpoint: Path | None, tables: Sequence[TableConfig]) -> ShardingPlan | None:
    """Returns the plan of a checkpoint of these tables; it does not contain replicated ones."""
    if checkpoint is None:
        return None
    saved = read_manifest(checkpoint).state
    if saved.plan is None:
        return None
    plan = ShardingPlan.from_json(saved.plan)
    names, saved_names = {table.name for table in tables}, {*plan.tables, *saved.replicated}
    check_same(
        checkpoint,
        [f"table '{name}' is not in it" for name in sorted(names - saved_names)]
        + [f"table '{name}' is not in the model" for name in sorted(saved_names - names)],
    )
    return plan
