"""When a job evaluates, saves, decides on its tables and ends, and how fast it learns: by its position alone.

timetable = Timetable(job, evaluations)
timetable.finished, timetable.evaluation_due, timetable.interval_due, timetable.checkpoint_due
"""

from __future__ import annotations

from dlrm_autoshard.config import ScheduleConfig
from dlrm_autoshard.data.batch import Split
from dlrm_autoshard.training.evaluations import Evaluations
from dlrm_autoshard.training.job import Job


class Timetable:
    """Says when checkpoints, evaluations and intervals are due in a job, which moves its position and selection on."""

    def __init__(self, job: Job, evaluations: Evaluations) -> None:
        self._config, self._data, self._evaluations = job.config, job.data, evaluations
        self._position, self._selection, self._total_steps = job.position, job.selection, job.total_steps
        self._steps_of_part = job.data.steps_of_interval(job.total_steps)  # of an epoch that is decided on in parts
        self._intervals = job.intervals

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
        return "val" if self._data.source.num_samples("val") else "test"

    @property
    def batch_is_whole(self) -> bool:
        """The next one. The last of an epoch may be a smaller one, whose times say nothing about the others."""
        return self._position.sample + self._data.global_batch <= self._data.samples

    @property
    def evaluation_due(self) -> bool:
        """After an epoch and every so many steps; after the last step where something is chosen by it."""
        every, position = self._config.train.eval_every_steps, self._position
        due = position.sample == 0 or self.out_of_steps or (every is not None and position.step % every == 0)
        last = self.out_of_steps and not self._selection.wanted
        return due and self._evaluations.step != position.step and not last

    @property
    def interval_due(self) -> bool:
        """Inside an epoch, where steps are named for its parts, or tables may move; at its end one ends in any case."""
        every = self._config.autoshard.reshard.every_steps
        if every is None:
            return (
                self._intervals.resharding is not None
                and self._position.sample // self._data.global_batch % self._steps_of_part == 0
            )
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


def lr_scale(step: int, config: ScheduleConfig) -> float:
    """Factor on the configured learning rate at `step`, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay_steps == 0 or step < config.decay_start_step:
        return 1.0
    done = min((step - config.decay_start_step) / config.decay_steps, 1.0)
    return config.end_lr_ratio + (1.0 - config.end_lr_ratio) * (1.0 - done) ** config.decay_power
