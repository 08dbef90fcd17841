"""Log of a running job: lines and a bar, metrics.jsonl, callbacks' figures, seconds by phase.

log = RunLog(job, callbacks)
with log.display, log.timed("evaluation"): log.metrics("val", {"auc": 0.79})
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dlrm_autoshard.autoshard.intervals import Ended
from dlrm_autoshard.records.folder import REPLACED, RunFolder
from dlrm_autoshard.records.jsonl import lost_if_unwritable
from dlrm_autoshard.training.callbacks import Callback
from dlrm_autoshard.training.display import LOG, Display
from dlrm_autoshard.training.job import Job
from dlrm_autoshard.training.journal import Journal


class RunLog:
    """seconds: of this start, by phase. write_start: writes, on rank 0, what continuing a run needs."""

    def __init__(self, job: Job, callbacks: Sequence[Callback]) -> None:
        active, position = job.runtime.rank == 0, job.position
        resumed_at = None if job.resumed_from is None else position.step
        self.journal = Journal(job.run_dir, callbacks, active=active, resumed_at=resumed_at)
        self.display = Display(active, job.total_steps, position.step, job.config.run.log_level)
        self.seconds = dict.fromkeys(("total", "evaluation", "checkpoints", "resharding"), 0.0)
        self.write_start: Callable[[], None] = lambda: None
        self._job, self._folder = job, RunFolder(job.run_dir)

    def line(self, text: str) -> None:
        self.display.line(text)

    def metrics(self, split: str, metrics: Mapping[str, float], epoch: int | None = None) -> None:
        """epoch: the one that training is in, if not said."""
        position = self._job.position
        self.keep_folder()
        self.journal.metrics(position.step, position.epoch if epoch is None else epoch, split, metrics)

    def interval(self, ended: Ended) -> None:
        """Says what was measured in it, and what was decided on that."""
        position, record = self._job.position, ended.record
        self.spent("resharding", ended.seconds)
        if record is not None:
            self.journal.profile(record)
            self.metrics("train", {"throughput": record.throughput, "step_ms": record.step_ms})
            self.line(
                f"epoch {position.epoch}  step {position.step}  {record.throughput:,.0f} examples/s  "
                f"loss {float(self._job.dense.global_loss):.4f}"
            )
        decision = ended.decision
        said = ended.noticed if decision is None else decision.text
        if said is not None:
            self.line(f"step {position.step}  {said}")

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.spent(phase, time.perf_counter() - started)

    def spent(self, phase: str, seconds: float) -> None:
        """Leaves seconds that are not training out of an interval's throughput, and of the speed that is shown."""
        self.seconds[phase] += seconds
        self._job.intervals.exclude(seconds)
        self.display.exclude(seconds)

    def keep_folder(self) -> None:
        """Says, on rank 0, where the run's directory was renamed or removed, and makes it again."""
        run_dir = self._job.run_dir
        if self._job.runtime.rank == 0 and self._folder.was_replaced():
            LOG.warning(REPLACED, run_dir)
            with lost_if_unwritable(run_dir):
                run_dir.mkdir(parents=True, exist_ok=True)
                self.write_start()

    def finish(self, best_on_test: Mapping[str, float] | None) -> None:
        """The result and the report, on rank 0, after training."""
        job, seconds = self._job, self.seconds
        seconds["training"] = 2 * seconds["total"] - sum(seconds.values())
        seconds |= job.start_seconds
        with self.display:
            for line in self.journal.finish(job.embeddings.plan, seconds, job.selection.best, best_on_test):
                self.line(line)
