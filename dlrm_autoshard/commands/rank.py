"""One rank of a training job: what `dlrm-autoshard train` and `torchrun launch/train.py` start.

What people can fix (config, data, plan, packages) ends in a sentence and exit status 2; an error in code of theirs in
its traceback from there on, all else in the whole one, with exit status 1.
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


_PLACE = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}  # of a rank, as torchrun says it


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads a rank's command line."""
    parser = argparse.ArgumentParser(description="Trains a DLRM as a YAML file says.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the YAML file")
    parser.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)  # by whoever started this rank
    add_settings(parser)
    arguments = parser.parse_intermixed_args(argv)
    sort_settings(arguments)
    return arguments


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the settings of a job beside its YAML file, for every way to start it."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN|CHECKPOINT",
        help="from RUN's newest checkpoint, or from this one of a run; without a name, of the newest run",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings that replace the file's"
    )


def sort_settings(arguments: argparse.Namespace) -> None:
    """`--resume train.epochs=3`: the override is no directory."""
    if arguments.resume and "=" in arguments.resume and not Path(arguments.resume).exists():
        arguments.overrides = [arguments.resume, *arguments.overrides]
        arguments.resume = ""
    if arguments.resume:
        arguments.resume = str(checked_path(Path(arguments.resume), "--resume"))


def check(config: Config, ranks: int, resume: str | None = None) -> DataSource | None:
    """Before the ranks of a job on this host run: UserError where it cannot start as its config says, a line where it
    can, and had better not. On several hosts the ranks check, so that all hear of what one host lacks. Returns the
    data, as `check_start` does."""
    import torch

    from dlrm_autoshard.training.start_checks import check_start

    source = check_start(config, ranks, resume)
    cores = len(os.sched_getaffinity(0))
    if ranks > cores and (config.run.device == "cpu" or not torch.cuda.is_available()):
        shared = count(cores, "core")
        print(f"{ranks} ranks share {shared}, and wait for one another: fewer train faster.", file=sys.stderr)
    return source


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as a rank that somebody has started."""
    keep_training_without_output()
    signal.signal(signal.SIGINT, leave)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that is gone would be told with torch's own stack
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
    """Trains as a rank, in this process; returns its exit status. source: the data, where they have been opened."""
    # Only now what takes seconds to import.
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
