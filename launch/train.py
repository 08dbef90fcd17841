"""Trains a DLRM as a YAML file says.

    torchrun --nproc_per_node=2 launch/train.py --config configs/movielens.yaml [section.key=value ...]
    torchrun --nproc_per_node=2 launch/train.py --config configs/movielens.yaml --resume
    python launch/train.py --config configs/debug_cpu.yaml             # one process, no torchrun

What people can mend (config, data, plan, packages) ends in a sentence and exit status 2, all else in a traceback.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dlrm_autoshard.doctor import EnvironmentProblem, require_pair


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the YAML file")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="DIR", help="from the run's (or DIR's) last checkpoint"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.resume and "=" in arguments.resume and not Path(arguments.resume).exists():
        # `--resume train.epochs=3`: the override is no directory.
        arguments.overrides.insert(0, arguments.resume)
        arguments.resume = ""
    return arguments


def complain(message: str) -> None:
    """One sentence from each machine for what all its ranks found, with the rank that says it."""
    rank = os.environ.get("RANK", "0")
    if _first_on_this_machine(message):
        print(f"[rank {rank}] {message}", file=sys.stderr, flush=True)


def _first_on_this_machine(message: str) -> bool:
    """torchrun gives each rank an error file in one folder a machine: there its ranks agree who speaks."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        return True
    said = Path(error_file).parent.parent / f"said_{hashlib.sha256(message.encode()).hexdigest()[:16]}"
    try:
        said.open("x").close()
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def main() -> int:
    arguments = parse()
    try:
        require_pair()
    except EnvironmentProblem as error:
        complain(str(error))
        return 2
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(run)(arguments)  # an uncaught exception's text reaches torchrun's summary


def run(arguments: argparse.Namespace) -> int:
    from dlrm_autoshard.config import load_config
    from dlrm_autoshard.trainer import train

    try:
        train(load_config(arguments.config, arguments.overrides), resume=arguments.resume)
    except ValueError as error:
        if not type(error).__module__.startswith(
            "dlrm_autoshard."
        ):  # not written for people: a bug, with its traceback
            raise
        complain(str(error))
        return 2
    except RuntimeError as error:
        if "Connection closed by peer" not in str(error) and "Connection reset by peer" not in str(error):
            raise
        complain("another rank went away in the middle of an exchange; what it says is the cause.")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
