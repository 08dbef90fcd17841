"""A training job on this rank, from its config to its report.

torchrun --nproc_per_node=2 launch/train.py --config configs/debug_cpu.yaml        # calls `run_job` on each rank
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil

from dlrm_autoshard.config import Config
from dlrm_autoshard.data.batch import DataSource
from dlrm_autoshard.distributed.ranks.heartbeats import RankFailure
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.training.agreement import agree, check_shared
from dlrm_autoshard.training.checkpoints.folder import run_and_checkpoint
from dlrm_autoshard.training.run_directory import (
    as_started,
    claimed_run_dir,
    job_of_this_process,
    lock_directory,
    record_start,
    run_that_obeyed,
    write_job,
)
from dlrm_autoshard.training.stop_signals import Stopped, StopSignals
from dlrm_autoshard.training.trainer import Trainer, TrainResult


def run_job(
    config: Config,
    resume: str | None = None,
    number: int = 1,
    begun: float | None = None,
    source: DataSource | None = None,
) -> TrainResult:
    """Runs a job on this rank, from its config to its last evaluation.

    number: of the job, in this process. begun: when it began, where that is not when the process did. source: the
    config's data, where they have been opened.
    resume: None starts a new run; "" continues the newest run of the config's name; else the run directory to continue,
    or a checkpoint in one. A job that is started again continues by itself, past checkpoints that are damaged, whatever
    its first start resumed. SIGINT, SIGTERM and SIGHUP end it with a checkpoint, and raise `Stopped`.
    """
    with StopSignals() as signals, ExitStack() as held:
        try:
            with Runtime.start(config.run) as runtime:
                agree(config, runtime)
                job = frozenset(filter(None, runtime.all_gather(job_of_this_process(number))))
                run, checkpoint = run_and_checkpoint(resume)
                own = runtime.from_rank_0(lambda: None if resume is None else run_that_obeyed(config, run, resume, job))
                if own is not None:
                    run, checkpoint = str(own), None
                claim = claimed_run_dir(config, run, job, None if own is None else resume)
                run_dir = runtime.from_rank_0(lambda: held.enter_context(claim))
                check_shared(run_dir, runtime)
                fall_back = resume is None or own is not None
                asked, config = config, as_started(run_dir, config)
                source = source if config is asked else None  # else of columns as an earlier start found them
                trainer = Trainer(config, runtime, run_dir, signals, checkpoint, fall_back=fall_back, source=source)
                if begun is not None:
                    trainer.job.start_seconds["joining"] -= begun - psutil.Process().create_time()
                config = trainer.job.config  # with what it left open as the data have it
                runtime.from_rank_0(lambda: record_start(run_dir, config, runtime.world_size))
                trainer.log.write_start = partial(_write_start_again, run_dir, config, runtime.world_size, job, resume)
                # Before it says that --resume was obeyed: a kill in between must not leave later checkpoints.
                step, checkpoints = trainer.job.position.step, trainer.job.checkpoints
                trainer.job.notes += runtime.from_rank_0(lambda: checkpoints.set_aside_after(step))
                runtime.from_rank_0(lambda: write_job(run_dir, job, resume))
                result = trainer.run()
        except RankFailure as failure:
            if failure.signal is None:
                raise
            stopped = Stopped(failure.signal)  # as another rank was, in mid-exchange, and told us
            stopped.args = failure.args
            raise stopped from failure
        trainer.write_report()  # only now: no rank waits for it, or takes the one that writes it for hung
        return result


def _write_start_again(run_dir: Path, config: Config, world_size: int, job: Set[str], resume: str | None) -> None:
    """In a directory that was made anew: all that continuing the run takes, and the lock, until this process ends."""
    lock_directory(run_dir)
    record_start(run_dir, config, world_size)
    write_job(run_dir, job, resume)
