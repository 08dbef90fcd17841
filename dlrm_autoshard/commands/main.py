"""The console script `dlrm-autoshard`: one module per subcommand.

A command module has `add_parser(subparsers)`, which sets `run=` to a function from the parsed arguments to an exit
status. It imports slow packages (torch, fbgemm) inside `run` only.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from dlrm_autoshard import __version__
from dlrm_autoshard.distributed.ranks.launch import complain
from dlrm_autoshard.errors import in_a_sentence
from dlrm_autoshard.formats.local_path import checked_path
from dlrm_autoshard.plug_in import own_traceback

COMMAND_MODULES: tuple[str, ...] = (
    "dlrm_autoshard.commands.train",
    "dlrm_autoshard.commands.configs",
    "dlrm_autoshard.commands.evaluate",
    "dlrm_autoshard.commands.export",
    "dlrm_autoshard.commands.doctor",
    "dlrm_autoshard.commands.data",
    "dlrm_autoshard.commands.tables",
    "dlrm_autoshard.commands.tasks",
    "dlrm_autoshard.commands.fit",
    "dlrm_autoshard.commands.compare_planners",
    "dlrm_autoshard.commands.plan",
    "dlrm_autoshard.commands.explain",
    "dlrm_autoshard.commands.bench",
    "dlrm_autoshard.commands.report",
)


_ALL, _HELP = " `dlrm-autoshard --help` lists all.", " --help lists all."
_WHAT = "Trains recommendation models over several ranks; places, measures and moves their embedding tables."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dlrm-autoshard", description=_WHAT)
    parser.add_argument("--version", action="version", version=f"dlrm-autoshard {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMAND_MODULES:
        importlib.import_module(module).add_parser(subparsers)
    words = sys.argv[1:] if argv is None else list(argv)
    if words and not words[0].startswith("-") and words[0] not in subparsers.choices:
        complain(f"dlrm-autoshard: there is no command '{words[0]}'.{_nearest(words[0], subparsers.choices) or _ALL}")
        return 2
    arguments, rest = parser.parse_known_args(words)
    arguments.words = words
    unknown = next((word for word in rest if word.startswith("-")), None)
    if unknown is not None:
        options = re.findall(r"--[\w-]+", subparsers.choices[arguments.command].format_usage())
        setting = getattr(arguments, "setting_instead", lambda option, value: "")
        following = rest[rest.index(unknown) + 1 :]
        instead = _nearest(unknown, options) or setting(unknown, following[0] if following else "...")
        complain(f"dlrm-autoshard {arguments.command}: there is no option '{unknown}'.{instead or _HELP}")
        return 2
    if rest and not hasattr(arguments, "overrides"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # settings of a job; argparse takes positional arguments only up to the first option
        arguments.overrides = [*arguments.overrides, *rest]
    try:
        for name, value in vars(arguments).items():
            if isinstance(value, Path):
                setattr(arguments, name, checked_path(value, name))
            elif isinstance(value, list) and value and isinstance(value[0], Path):
                setattr(arguments, name, [checked_path(path, name) for path in value])
        status = int(arguments.run(arguments) or 0)
        sys.stdout.flush()  # a reader that has gone raises here, where BrokenPipeError is caught
        return status
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"dlrm-autoshard {arguments.command}: stopped.", file=sys.stderr)
        return 130
    except Exception as error:
        text = in_a_sentence(error)
        if text is None:
            theirs = own_traceback(error)
            if theirs is None:
                raise
            complain(f"dlrm-autoshard {arguments.command}: {theirs}")
            return 1
        if not getattr(error, "said_here", False):  # already printed by the rank that caused it
            complain(f"dlrm-autoshard {arguments.command}: {text}")
        return 2


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.75)
    return f" Did you mean '{close[0]}'?" if close else ""


if __name__ == "__main__":
    sys.exit(main())
