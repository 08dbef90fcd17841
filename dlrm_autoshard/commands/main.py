"""The console script `dlrm-autoshard`: one subcommand a module, each of which adds its own parser.

A command module has `add_parser(subparsers)`, which sets `run=` to a function of the parsed arguments that returns an
exit status. Modules are imported only by name here and import heavy things (torch, fbgemm) inside `run`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from dlrm_autoshard.errors import in_a_sentence

COMMAND_MODULES: tuple[str, ...] = (
    "dlrm_autoshard.commands.doctor",
    "dlrm_autoshard.commands.data",
    "dlrm_autoshard.commands.tables",
    "dlrm_autoshard.commands.tasks",
    "dlrm_autoshard.commands.fit",
    "dlrm_autoshard.commands.evaluate",
    "dlrm_autoshard.commands.plan",
    "dlrm_autoshard.commands.explain",
    "dlrm_autoshard.commands.bench",
    "dlrm_autoshard.commands.report",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dlrm-autoshard", description=__doc__.split(":")[0] + ".")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMAND_MODULES:
        importlib.import_module(module).add_parser(subparsers)
    arguments = parser.parse_args(argv)
    try:
        status = int(arguments.run(arguments) or 0)
        sys.stdout.flush()  # here, where a reader who has gone can still be forgiven
        return status
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"dlrm-autoshard {arguments.command}: stopped.", file=sys.stderr)
        return 130
    except Exception as error:
        text = in_a_sentence(error)
        if text is None:
            raise
        print(f"dlrm-autoshard {arguments.command}: {text}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
