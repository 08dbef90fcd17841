"""A job's samples: columns in the model's order, this rank's batches, and numbers of steps.

data = TrainingData(source, config, runtime)
with data.batches("train", epoch=0) as loader: ...
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from dlrm_autoshard.autoshard.watch import steps_of_part
from dlrm_autoshard.config import Config
from dlrm_autoshard.data.batch import DataSource, Split, label_names_of
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.data.loader import Loader, reader_threads
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.training.state import Position, in_trained_order


class TrainingData:
    """A job's data. global_batch: samples per step over all ranks."""

    def __init__(
        self,
        source: DataSource,
        config: Config,
        runtime: Runtime,
        checkpoint: Path | None = None,
        *,
        labelled: bool = True,
    ) -> None:
        """checkpoint: keep its order of columns. labelled: False if labels are not needed."""
        self.source, self.columns = in_trained_order(source, config.tables.shared, checkpoint)
        self.reordered = self.source is not source
        self.features = Features.of(self.source.tables, config.tables.shared, config.tables.sequences)
        self.label_names = label_names_of(self.source)
        self.global_batch = config.train.batch_size * runtime.world_size
        self._config, self._runtime, self._labelled, self._reading = config, runtime, labelled, Lock()

    @property
    def samples(self) -> int:
        """Number of training samples per epoch."""
        return self.source.num_samples("train")

    @property
    def steps_of_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    def count_steps(self, position: Position) -> int:
        """Returns the total number of steps: those done at `position` and those to come."""
        train, total = self._config.train, position.step
        if position.epoch < train.epochs:
            this_epoch = -(-(self.samples - position.sample) // self.global_batch)
            total += this_epoch + (train.epochs - position.epoch - 1) * self.steps_of_epoch
        return total if train.max_steps is None else min(total, train.max_steps)

    def steps_of_interval(self, total: int) -> int:
        """Returns steps per interval without `reshard.every_steps`: an epoch, or an equal part of it. total: of the
        job."""
        epoch = self.steps_of_epoch
        return epoch if self._config.autoshard.reshard.every_epochs > 1 else steps_of_part(epoch, total)

    def batches(self, split: Split, epoch: int, first_sample: int = 0) -> Loader:
        """Returns a loader of this rank's slices of an epoch."""
        train, data, runtime = self._config.train, self._config.data, self._runtime
        return Loader(
            self.source,
            split,
            epoch,
            train.batch_size if split == "train" else train.eval_batch_size or train.batch_size,
            runtime.rank,
            runtime.world_size,
            first_sample=first_sample,
            prefetch_batches=data.prefetch_batches,
            threads=reader_threads(data.reader_threads, runtime.device, runtime.local_world_size),
            on_bad_id=data.on_bad_id,
            cores=runtime.loader_cores,
            pin=runtime.device.type == "cuda",
            labelled=self._labelled,
            finite=split != "train" or train.on_nan == "stop",
            reading=self._reading,
        )
