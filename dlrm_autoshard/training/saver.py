"""Decides when a job writes checkpoints, and writes them.

saver = Saver(job, log, signals)
saver.save()                            # unless there is one of this step
"""

from __future__ import annotations

from collections.abc import Callable

from dlrm_autoshard.training.checkpoints.folder import step_of
from dlrm_autoshard.training.checkpoints.manifest import CheckpointError
from dlrm_autoshard.training.display import LOG
from dlrm_autoshard.training.job import Job
from dlrm_autoshard.training.run_log import RunLog
from dlrm_autoshard.training.stop_signals import Stopped, StopSignals


class Saver:
    """Saves a job; every method is a collective."""

    def __init__(self, job: Job, log: RunLog, signals: StopSignals) -> None:
        self._job, self._log, self._signals = job, log, signals
        self._stops = job.config.checkpoint.on_error == "stop"

    @property
    def due(self) -> bool:
        """Whether to write a checkpoint after this step: every so many steps and epochs, and at the end."""
        job, every = self._job, self._job.config.checkpoint
        by_step = every.every_steps is not None and job.position.step % every.every_steps == 0
        by_epoch = job.position.sample == 0 and job.position.epoch % every.every_epochs == 0
        return by_step or by_epoch or job.finished or job.dense.stop_agreed

    def save(self) -> None:
        """Saves, unless this step has a checkpoint: a job resumed from it repeats evaluations made since."""
        job = self._job
        if job.config.checkpoint.enabled:
            self._log.keep_folder()
            with self._log.timed("checkpoints"):
                self.finish()
                newest = job.checkpoints.latest()
                if newest is None or step_of(newest) != job.position.step:
                    self._written(lambda: job.state.save(job.position))

    def save_this_step(self) -> None:
        """Saves and waits until the checkpoint is on disk."""
        self.save()
        with self._log.timed("checkpoints"):
            self.finish()

    def finish(self) -> None:
        """Waits until the checkpoint being written is on disk."""
        self._written(self._job.checkpoints.finish)

    def end_if_asked(self) -> None:
        """Saves and raises `Stopped` if any rank received a signal."""
        received = [number for number in self._job.runtime.all_gather(self._signals.received) if number is not None]
        if received:
            self.save_this_step()
            raise Stopped(received[0])

    def point_best_at(self, step: int) -> None:
        """Marks this step's existing checkpoint as the best."""
        with self._log.timed("checkpoints"):
            self._written(lambda: self._job.runtime.from_rank_0(lambda: self._job.checkpoints.point_best_at(step)))

    def _written(self, write: Callable[[], None]) -> None:
        try:
            write()
        except CheckpointError as error:
            if self._stops:
                raise
            LOG.warning("step %d  %s", self._job.position.step, error)
