"""A whole job from Python, for notebooks and schedulers.

from dlrm_autoshard import train
result = train({"data": {"source": "movielens"}}, "train.epochs=2")       # or "demo", "mine.yaml", a Config
result.metrics["auc"], result.run_dir
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dlrm_autoshard.config import Config, apply_overrides, load_config, parse_config
from dlrm_autoshard.errors import UserError, in_a_sentence
from dlrm_autoshard.training.display import LOG
from dlrm_autoshard.training.find_config import find_config
from dlrm_autoshard.training.random_state import random_state, restore_random_state
from dlrm_autoshard.training.run_job import run_job
from dlrm_autoshard.training.trainer import TrainResult

_numbers = itertools.count(1)  # a torchrun that starts the process again continues each of its jobs


def train(
    config: Config | Mapping[str, Any] | str | Path, *overrides: str, resume: str | Path | None = None
) -> TrainResult:
    """Trains in this process, or as one rank of those that torchrun has started, which all call it. Returns the last
    evaluation's metrics and the run's directory.

    config: a dict of the YAML's sections, a YAML file, or the name of a config of the package. overrides: such as
    "train.epochs=3". resume: a run's directory, or a checkpoint in one, to go on from; "" for the newest run of the
    config's name. The process is as it was afterwards: cores, threads, random numbers, signals.

    UserError says what is wrong and what to try. Ctrl-C ends the job with a checkpoint and raises a KeyboardInterrupt.
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
    """Restores what `Runtime` does not: random numbers, the least level of lines that are shown, how GPUs multiply."""
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    random, level, tf32 = random_state(device), LOG.level, torch.backends.cuda.matmul.allow_tf32
    try:
        yield
    finally:
        restore_random_state(random, device)
        LOG.setLevel(level)
        torch.backends.cuda.matmul.allow_tf32 = tf32
