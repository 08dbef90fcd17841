"""Runs one rank of a training job: `dlrm-autoshard train` and `torchrun launch/train.py` start it.

Mistakes that people can fix (config, data, plan, packages) print a sentence and exit 2; errors in user code print its
part of the traceback and exit 1; all others print the whole traceback and exit 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_autoshard.commands.streams import keep_training_without_output
from dlrm_autoshard.distributed.ranks.launch import complain, leave, recorded
from dlrm_autoshard.errors import UserError, in_a_sentence
from dlrm_autoshard.formats.local_path import checked_path
from dlrm_autoshard.formats.words import count
from dlrm_autoshard.plug_in import own_traceback

if TYPE_CHECKING:
    from dlrm_autoshard.config import Config
    from dlrm_autoshard.data.batch import DataSource


_PLACE = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}  # torchrun's variables and their defaults


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads a rank's command line."""
    parser = argparse.ArgumentParser(description="Trains a DLRM as a YAML file says.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the YAML file")
    parser.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)  # the launcher has run `check`
    add_settings(parser)
    arguments = parser.parse_intermixed_args(argv)
    sort_settings(arguments)
    return arguments


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds --resume and the settings that override the YAML file."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN|CHECKPOINT",
        help="continue from a run's newest checkpoint, or from this checkpoint (without a name: the newest run)",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings that replace the file's"
    )


def sort_settings(arguments: argparse.Namespace) -> None:
    """Takes `--resume train.epochs=3` as --resume without a name, followed by a setting."""
    if arguments.resume and "=" in arguments.resume and not Path(arguments.resume).exists():
        arguments.overrides = [arguments.resume, *arguments.overrides]
        arguments.resume = ""
    if arguments.resume:
        arguments.resume = str(checked_path(Path(arguments.resume), "--resume"))


def check(config: Config, ranks: int, resume: str | None = None) -> DataSource | None:
    """Checks a job before its ranks start: raises UserError if it cannot start, warns if ranks must share cores.

    Returns the opened data, as `check_start` does. With several hosts each rank checks instead, so that all hear of
    what one host lacks."""
    import torch

    from dlrm_autoshard.training.start_checks import check_start

    source = check_start(config, ranks, resume)
    cores = len(os.sched_getaffinity(0))
    if ranks > cores and (config.run.device == "cpu" or not torch.cuda.is_available()):
        shared = count(cores, "core")
        print(f"{ranks} ranks share {shared} and wait for each other: fewer ranks train faster.", file=sys.stderr)
    return source


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as one rank of a job that a launcher started."""
    keep_training_without_output()
    signal.signal(signal.SIGINT, leave)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch prints C++ stacks when a store goes away
    from dlrm_autoshard.commands.environment_checks import require_pair
    from dlrm_autoshard.config import load_config

    source = None
    try:
        arguments = parse(argv)
        require_pair()
        config = load_config(arguments.config, arguments.overrides)
        ranks, here, number = (int(os.environ.get(name, alone)) for name, alone in _PLACE.items())
        if not arguments.checked and ranks == here and number == 0:
            source = check(config, ranks)
    except UserError as error:
        complain(str(error))
        return 2
    return train(config, arguments.resume, source)


@recorded
def train(config: Config, resume: str | None, source: DataSource | None) -> int:
    """Trains as a rank in this process and returns the exit status. source: the data, if already open."""
    # These imports take seconds.
    from dlrm_autoshard.distributed.ranks.heartbeats import RankFailure
    from dlrm_autoshard.training.stop_signals import Stopped
    from dlrm_autoshard.training.train import run_job

    try:
        run_job(config, resume=resume, source=source)
    except Stopped as stopped:
        complain(str(stopped))
        return 128 + stopped.number
    except RankFailure as failure:
        if not failure.said_here:
            complain(str(failure))
        return 2
    except Exception as error:
        text = in_a_sentence(error)
        if text is None:
            theirs = own_traceback(error)
            if theirs is None:
                raise
            complain(theirs)
            return 1
        complain(text)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
