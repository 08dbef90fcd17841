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
    "dlrm_autoshard.doctor_command",
    "dlrm_autoshard.data.criteo_command",
    "dlrm_autoshard.planning.tables_command",
    "dlrm_autoshard.planning.tasks_command",
    "dlrm_autoshard.planning.fit_command",
    "dlrm_autoshard.planning.evaluate_command",
    "dlrm_autoshard.planning.plan_command",
    "dlrm_autoshard.planning.explain_command",
    "dlrm_autoshard.benchmarks.bench_command",
    "dlrm_autoshard.report.report_command",
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
