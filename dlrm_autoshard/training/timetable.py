"""When a job evaluates, writes a checkpoint, decides on its tables, and ends: by its position alone.

timetable = Timetable(job)
timetable.finished, timetable.evaluation_due, timetable.interval_due, timetable.checkpoint_due
"""

from __future__ import annotations

from dlrm_autoshard.data.batch import Split
from dlrm_autoshard.training.job import Job


class Timetable:
    """Of a job, which moves its position and selection on."""

    def __init__(self, job: Job) -> None:
        self._config, self._source, self._global_batch = job.config, job.source, job.global_batch
        self._position, self._selection, self._total_steps = job.position, job.state.selection, job.total_steps
        self._steps_of_part = job.steps_of_interval(job.total_steps)  # of an epoch that is decided on in parts
        self._evaluated_step = -1  # the last evaluation's

    @property
    def finished(self) -> bool:
        return self._position.epoch >= self._config.train.epochs or self.out_of_steps or self._selection.stop

    @property
    def out_of_steps(self) -> bool:
        return self._position.step >= self._total_steps

    @property
    def steps_left(self) -> int:
        return 0 if self._selection.stop else self._total_steps - self._position.step

    @property
    def split_between_epochs(self) -> Split:
        return "val" if self._source.num_samples("val") else "test"

    @property
    def batch_is_whole(self) -> bool:
        """The next one. The last of an epoch may be a smaller one, whose times say nothing about the others."""
        return self._position.sample + self._global_batch <= self._source.num_samples("train")

    @property
    def evaluation_due(self) -> bool:
        """After an epoch and every so many steps; after the last step where something is chosen by it."""
        every, position = self._config.train.eval_every_steps, self._position
        due = position.sample == 0 or self.out_of_steps or (every is not None and position.step % every == 0)
        last = self.out_of_steps and not self._selection.wanted
        return due and self._evaluated_step != position.step and not last

    def evaluated(self) -> None:
        self._evaluated_step = self._position.step

    @property
    def interval_due(self) -> bool:
        """Inside an epoch; at its end one ends in any case."""
        every = self._config.autoshard.reshard.every_steps
        if every is None:
            return self._position.sample // self._global_batch % self._steps_of_part == 0
        return self._position.step % every == 0

    @property
    def checkpoint_due(self) -> bool:
        """Inside an epoch."""
        return self._checkpoint_step and not self.out_of_steps

    @property
    def checkpoint_due_after_epoch(self) -> bool:
        every_epochs = self._position.epoch % self._config.checkpoint.every_epochs == 0
        return self.finished or every_epochs or self._checkpoint_step

    @property
    def _checkpoint_step(self) -> bool:
        every = self._config.checkpoint.every_steps
        return every is not None and self._position.step % every == 0
