"""Runs a whole job from config to report: `train` for notebooks and schedulers, `run_job` on each rank.

from dlrm_autoshard import train
result = train({"data": {"source": "movielens"}}, "train.epochs=2")       # or "demo", "mine.yaml", a Config
result.metrics["auc"], result.run_dir
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from dlrm_autoshard.config import Config, apply_overrides, find_config, load_config, parse_config
from dlrm_autoshard.data.batch import DataSource
from dlrm_autoshard.distributed.ranks.heartbeats import RankFailure
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.errors import UserError, in_a_sentence
from dlrm_autoshard.training.agreement import agree, check_shared
from dlrm_autoshard.training.checkpoints.folder import run_and_checkpoint
from dlrm_autoshard.training.display import LOG
from dlrm_autoshard.training.random_state import random_state, restore_random_state
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

_numbers = itertools.count(1)  # if torchrun restarts the process, each of its jobs continues its own run


def train(
    config: Config | Mapping[str, Any] | str | Path, *overrides: str, resume: str | Path | None = None
) -> TrainResult:
    """Trains in this process, or as one of torchrun's ranks, which all call it. Returns the last evaluation's metrics
    and the run's directory.

    config: a dict of the YAML's sections, a YAML file, or the name of a shipped config. overrides: such as
    "train.epochs=3". resume: a run's directory, or a checkpoint in one, to continue; "" for the newest run of the
    config's name. The process's cores, threads, random numbers and signals are restored afterwards.

    UserError says what is wrong and what to try. Ctrl-C ends the job with a checkpoint and raises KeyboardInterrupt.
    """
    begun = time.time()
    try:
        with _process_kept():
            return run_job(_parsed(config, overrides), None if resume is None else str(resume), next(_numbers), begun)
    except OSError as error:
        said = in_a_sentence(error)
        if said is None:
            raise
        raise UserError(said) from error


def _parsed(config: Config | Mapping[str, Any] | str | Path, overrides: tuple[str, ...]) -> Config:
    if isinstance(config, str | Path):
        return load_config(find_config(str(config)), overrides)
    record = config.model_dump(mode="json") if isinstance(config, Config) else copy.deepcopy(dict(config))
    apply_overrides(record, overrides)
    return parse_config(record)


@contextmanager
def _process_kept() -> Iterator[None]:
    """Restores what `Runtime` does not: random numbers, log level, TF32."""
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    random, level, tf32 = random_state(device), LOG.level, torch.backends.cuda.matmul.allow_tf32
    try:
        yield
    finally:
        restore_random_state(random, device)
        LOG.setLevel(level)
        torch.backends.cuda.matmul.allow_tf32 = tf32


def run_job(
    config: Config,
    resume: str | None = None,
    number: int = 1,
    begun: float | None = None,
    source: DataSource | None = None,
) -> TrainResult:
    """Runs a job on this rank, from its config to its last evaluation.

    number: counts jobs of this process. begun: when the job began, if not with the process. source: the data, if
    already open. resume: None starts a new run; "" continues the newest run of the config's name; else the run
    directory, or the checkpoint in one, to continue. A restarted job continues by itself, skipping damaged checkpoints,
    whatever its first start resumed. SIGINT, SIGTERM and SIGHUP end it with a checkpoint and raise `Stopped`.
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
                source = source if config is asked else None  # reopen if `as_started` changed the columns
                trainer = Trainer(config, runtime, run_dir, signals, checkpoint, fall_back=fall_back, source=source)
                if begun is not None:
                    trainer.job.start_seconds["joining"] -= begun - psutil.Process().create_time()
                config = trainer.job.config  # completed by the data
                runtime.from_rank_0(lambda: record_start(run_dir, config, runtime.world_size))
                trainer.log.write_start = partial(_write_start_again, run_dir, config, runtime.world_size, job, resume)
                # Before recording that --resume was followed: a kill in between must not leave later checkpoints.
                step, checkpoints = trainer.job.position.step, trainer.job.checkpoints
                trainer.job.notes += runtime.from_rank_0(lambda: checkpoints.set_aside_after(step))
                runtime.from_rank_0(lambda: write_job(run_dir, job, resume))
                result = trainer.run()
        except RankFailure as failure:
            if failure.signal is None:
                raise
            stopped = Stopped(failure.signal)  # another rank received it during an exchange
            stopped.args = failure.args
            raise stopped from failure
        trainer.write_report()  # after the ranks' runtime: no rank waits for it, or takes the writer for hung
        return result


def _write_start_again(run_dir: Path, config: Config, world_size: int, job: Set[str], resume: str | None) -> None:
    """Writes all that continuing the run needs into a directory that was removed and made again, and locks it."""
    lock_directory(run_dir)
    record_start(run_dir, config, world_size)
    write_job(run_dir, job, resume)
