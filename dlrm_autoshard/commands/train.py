"""`dlrm-autoshard train CONFIG`: checks the config, starts the ranks and waits for them.

dlrm-autoshard train demo                                       # a config of the package, or a YAML file
dlrm-autoshard train mine.yaml --ranks 4 train.epochs=3         # keys override
dlrm-autoshard train mine.yaml --resume                         # the newest run of that name
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
from typing import Any

from dlrm_autoshard.commands import rank
from dlrm_autoshard.commands.streams import keep_training_without_output
from dlrm_autoshard.config import find_config
from dlrm_autoshard.errors import UserError

_JOB = "a name unique to this job: a start under it continues from its newest checkpoint (needed with --nodes)"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("train", help="train as a YAML file says, on this machine or as one of several")
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a shipped one (see `configs`)")
    rank.add_settings(parser)
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="processes on this machine (default: one per GPU; without GPUs 2)"
    )
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="N", help="restarts after a rank died (default: none)"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines that run this same command")
    parser.add_argument("--head", metavar="HOST:PORT", help="with --nodes: a free port on one of the machines")
    parser.add_argument("--job", default="", metavar="ID", help=_JOB)
    parser.set_defaults(run=run, setting_instead=setting_instead)


def run(arguments: argparse.Namespace) -> int:
    """Returns the ranks' exit status: 0, 2 after a user's mistake, 128 + its number after a signal."""
    from dlrm_autoshard.commands.environment_checks import require_pair
    from dlrm_autoshard.config import load_config
    from dlrm_autoshard.distributed.ranks.launch import launch, leave

    rank.sort_settings(arguments)
    for name in ("restarts", "nodes", "ranks"):
        least, value = int(name != "restarts"), getattr(arguments, name)
        if value is not None and value < least:
            raise UserError(f"--{name} is {value}; it must be {least} or more.")
    if arguments.nodes > 1 and not (arguments.head and arguments.job):
        raise UserError("--nodes needs --head HOST:PORT and --job ID, the same on every machine.")
    if arguments.head and arguments.nodes == 1:
        raise UserError("--head is for several machines: give their number with --nodes, and a --job.")
    if arguments.head and not re.fullmatch(r"\S+:\d{1,5}", arguments.head):
        raise UserError(f"--head is '{arguments.head}'; it must have the form HOST:PORT, such as node0:29400.")
    keep_training_without_output()
    signal.signal(signal.SIGINT, leave)  # until the ranks run
    require_pair()
    path = find_config(arguments.config)
    config = load_config(path, arguments.overrides)
    ranks = arguments.ranks or default_ranks(config.run.device)
    source = None
    if arguments.nodes == 1:  # with --job an earlier start may have followed --resume already
        source = rank.check(config, ranks, None if arguments.job else arguments.resume)
    if ranks == arguments.nodes == 1 and not arguments.restarts and not arguments.job:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        return rank.train(config, arguments.resume, source)
    resume = [] if arguments.resume is None else [f"--resume={arguments.resume}"]
    return launch(
        ["-m", rank.__name__, "--checked", "--config", str(path), *arguments.overrides, *resume],
        ranks,
        nodes=arguments.nodes,
        head=arguments.head,
        job=arguments.job,
        restarts=arguments.restarts,
    )


def setting_instead(option: str, value: str) -> str:
    """Returns a hint for a config key that was given as an option: `--epochs 3` instead of train.epochs=3."""
    from dlrm_autoshard.config import Config
    from dlrm_autoshard.config_errors import all_keys, in_other_words, nearest_key

    name, equals, after = option.lstrip("-").replace("-", "_").partition("=")
    keys = list(all_keys(Config))
    key = name if name in keys else nearest_key(keys, name)
    if name == "config":
        return " Give the YAML file without --config."
    if said := in_other_words(name):
        return f" {said[0].upper()}{said[1:]}."
    value = after if equals else value
    return f" Settings are written without dashes: {key}={value}" if key else " Settings are written section.key=value."


def default_ranks(device: str = "auto") -> int:
    """Returns one rank per GPU; without GPUs two if there are two cores, as one rank has nothing to place."""
    import torch

    if device != "cpu" and shutil.which("nvidia-smi") and torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(2, len(os.sched_getaffinity(0)))
